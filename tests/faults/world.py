"""One window of play that is trained in a second, and all that a run leaves of it."""

import asyncio
import hashlib
import json
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings, merge_overrides
from babylon.core.windows import parse_window_id
from babylon.dataset.build import build_tables, selection_of, windows_of
from babylon.policies.load import load_policy
from babylon.policies.tokenizer import render_prompt
from babylon.recorder import Action, LlmCall, TrajectoryRecorder
from babylon.stages.retention import retire_checkpoints
from babylon.store import Store, open_store
from babylon.store.calls import RecordedCall, insert_calls
from babylon.store.embedded import EmbeddedPostgres
from babylon.store.policies import ensure_base
from benchmarks.loopback_judge import LoopbackJudge, Mind
from tests.conftest import TEMPLATE, fresh_database
from tests.faults.processes import Worker
from tests.tiny_policy import plain_logprobs, save_tiny_policy
from tests.unit.training.grpo.windows import TIMINGS

WINDOW = parse_window_id("2025-11-14T09:00")
SYSTEM, USER = "Trade.", "m1 0.50"
REPLIES = ("buy m1", "sell m1", "hold", "buy m2", "sell m2", "wait", "buy m3", "sell m3")
LEASE_S = 0.5
SETTINGS: dict[str, Any] = {
    "windows": {"lease_s": LEASE_S},
    "quality": {"min_actions": 1, "target_trajectories": 7},
    "scoring": {"scorer": "ruler", "write_back": True},
    "judge": {"model": "loopback", "concurrency": 2},
    "training": {"iterations": 2, "learning_rate": 1e-4, "max_staleness": 0},
    "deployment": {"keep_checkpoints": 1},
    "evaluation": {"scenarios": 32},
}
FLOW = "tests.faults.inside:train"
WHOLE = os.environ.get("FAULTS") == "all"  # `make faults`; `make test` takes a share
whole_only = pytest.mark.skipif(not WHOLE, reason="takes long: `make faults`")
RUN = re.compile(r"-e\d+|-[0-9a-f]{32}")  # what names a claim or an attempt: no result
TOLD_ONCE = {*TIMINGS, "duration_minutes", "max_tokens"}


@dataclass(frozen=True, slots=True)
class World:
    """Start of every case: a server with a database to copy, and a base model."""

    server: EmbeddedPostgres
    template: str
    base: Path

    @asynccontextmanager
    async def place(self, home: Path, **changes: Any) -> AsyncIterator["Place"]:
        """A copy, with a judge of its own; ``changes`` are settings."""
        copied = asynccontextmanager(fresh_database)(self.server, self.template)
        async with copied as url, LoopbackJudge(Mind(scale=(-10.0, 10.0))) as judge:
            own = {"database": {"url": url}, "home": home, "judge": {"base_url": judge.base_url}}
            settings = load_settings(**merge_overrides(SETTINGS, own, changes))
            async with open_store(settings) as store:
                await _old_checkpoint(store, settings)
                yield Place(settings, store, judge)


@dataclass(frozen=True, slots=True)
class Place:
    """One case's database, home and judge."""

    settings: Settings
    store: Store
    judge: LoopbackJudge

    def worker(self, failpoint: str = "", *arguments: str, **options: Any) -> Worker:
        return Worker(self.settings, FLOW, WINDOW.id, *arguments, failpoint=failpoint, **options)

    async def run(self, failpoint: str = "", **options: Any) -> tuple[int, str]:
        """(exit code, what it said) of a worker that is waited for."""
        with self.worker(failpoint, **options) as worker:
            return await worker.ended(), worker.said

    async def lease_over(self) -> None:
        """Wait until nobody holds the window, by the database's clock."""
        held = "SELECT count(*) FROM babylon.windows WHERE lease_until > now()"
        while await self.store.pool.fetchval(held):
            await asyncio.sleep(LEASE_S / 10)

    async def rule_out(self) -> None:
        """Bend the logged logprobs, so that the update is rejected without a game."""
        await self.store.pool.execute(
            "UPDATE babylon.calls SET logprobs = ARRAY(SELECT x - 0.2 FROM unnest(logprobs) AS x)"
        )

    async def later_runs(self) -> None:
        """Sweep as the next window's run does, and publish as the daily run does."""
        for path in self.settings.home.root.rglob("*.tmp"):
            os.utime(path, (0, 0))
        await retire_checkpoints(self.store, self.settings)
        selection = await selection_of(self.store, self.settings.publish)
        for scored in await windows_of(self.store, WINDOW.start.date()):
            await build_tables(self.store, self.settings.home, scored, selection)

    async def outcome(self) -> dict[str, Any]:
        """Everything that must not depend on how often the run was interrupted."""
        rows = {name: await self._rows(query) for name, query in QUERIES.items()}
        return {**rows, "files": await asyncio.to_thread(self._files)}

    async def _rows(self, query: str) -> list[Any]:
        found = [dict(row) for row in await self.store.pool.fetch(query)]
        text = json.dumps([_told(row) for row in found], default=str)
        return list(json.loads(RUN.sub("", text.replace(str(self.settings.home.root), ""))))

    def _files(self) -> dict[str, str]:
        home = self.settings.home.root
        ours = (home / name for name in ("artifacts", "checkpoints", "datasets"))
        files = [path for place in ours for path in place.rglob("*") if path.is_file()]
        return {
            RUN.sub("", str(path.relative_to(home))): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
        }


QUERIES = {
    "window": "SELECT state, lease_until, batch_id, reason, metrics,"
    " scored - '{claim,fingerprint,metrics}'::text[] AS scored FROM babylon.windows",
    "trained": "SELECT * FROM babylon.trained ORDER BY trajectory_id",
    "policies": "SELECT policy_version, parent_version, kind, uri, batch_id, metrics,"
    " verdict - 'claim' AS verdict, removed_at IS NULL FROM babylon.policies ORDER BY 1",
    "routes": "SELECT route_version, policy_version, reason, mode, challenger_version, share"
    " FROM babylon.routes ORDER BY 1",
    "rejections": "SELECT * FROM babylon.rejections ORDER BY trajectory_id",
    "scores": "SELECT * FROM babylon.scores ORDER BY trajectory_id",
    "judgments": "SELECT key, scores, problem FROM babylon.judgments"
    " WHERE key NOT LIKE '%/sent' ORDER BY key",
    "open jobs": "SELECT * FROM babylon.training_jobs WHERE status <> 'done'",
    "plays": 'SELECT "trajectoryId", "usedInTraining", "trainedInBatch", "aiJudgeReward"'
    ' FROM trajectories ORDER BY "trajectoryId"',
    "batches": 'SELECT "batchId", "modelVersion", "trajectoryIds", "rewardsJson", status'
    " FROM training_batches",
    "models": 'SELECT "modelId", "trainingBatch", status, "storagePath" FROM trained_models',
    "rewards": 'SELECT "trajectoryId", "overallScore", rank FROM reward_judgments ORDER BY 1',
}


def _told(row: dict[str, Any]) -> dict[str, Any]:
    """The row without clock times, and without what the judge was asked for in one run."""
    row.pop("trained_at", None)
    row.pop("created_at", None)
    for name, value in row.items():
        if isinstance(value, dict):
            row[name] = {
                key: inner
                for key, inner in value.items()
                if key not in TOLD_ONCE and not key.startswith("judge_")
            }
    return row


def prepare(server: EmbeddedPostgres, directory: Path) -> World:
    """Play the window into a database that is only ever copied. Blocking."""
    base = save_tiny_policy(directory / "base", seed=0)
    template = f"played_{uuid4().hex}"
    asyncio.run(_fill(server, template, base, directory / "home"))
    return World(server, template, base)


async def _fill(server: EmbeddedPostgres, template: str, base: Path, home: Path) -> None:
    connection = await asyncpg.connect(server.url("postgres"))
    await connection.execute(f"CREATE DATABASE {template} TEMPLATE {TEMPLATE} STRATEGY file_copy")
    await connection.close()
    async with open_store(
        load_settings(database={"url": server.url(template)}, home=home)
    ) as store:
        await ensure_base(store, uri=str(base), base_model="tiny")
        await play(store, base)


async def play(store: Store, base: Path, name: Callable[[int], str] = "play-{}".format) -> None:
    """Eight agents answer one prompt each through the gateway; a ninth never calls a model."""
    calls = [_gateway_call(base, number, name(number)) for number in range(len(REPLIES))]
    recorder = TrajectoryRecorder(store, clock=lambda: WINDOW.start)
    for number, call in enumerate(calls):
        recorder.start(f"agent-{number}", trajectory_id=name(number))
        await _finish(recorder, name(number), float(number), call.response)
    recorder.start("agent-8", trajectory_id=name(8))
    await _finish(recorder, name(8), 0.0, None)
    await insert_calls(store, calls)


async def _finish(recorder: TrajectoryRecorder, name: str, pnl: float, reply: str | None) -> None:
    call = LlmCall(
        model="babylon",
        system_prompt=SYSTEM,
        user_prompt=USER,
        response=reply or "",
        temperature=1.0,
        max_tokens=8,
        purpose="action",
    )
    recorder.step(
        name,
        environment_state={"agentBalance": 1000, "agentPnL": 0, "openPositions": 0},
        llm_calls=[call] if reply else [],
        action=Action(action_type="HOLD", success=True, parameters={}),
        reward=pnl,
    )
    await recorder.finish(name, final_pnl=pnl)


def _gateway_call(base: Path, number: int, trajectory_id: str) -> RecordedCall:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}]
    model, tokenizer = load_policy(base)
    prompt = render_prompt(tokenizer, messages)
    reply = tokenizer.encode(REPLIES[number], add_special_tokens=False)
    completion = [*reply, tokenizer.eos_token_id]
    return RecordedCall(
        call_id=f"call-{trajectory_id}",
        agent_id=f"agent-{number}",
        trajectory_id=trajectory_id,
        step_number=0,
        policy_version=0,
        route_version=1,
        model="babylon",
        messages=json.dumps(messages),
        response=REPLIES[number],
        prompt_token_ids=list(prompt),
        completion_token_ids=completion,
        logprobs=plain_logprobs(model, prompt, completion).tolist(),
        temperature=1.0,
        top_p=1.0,
        max_tokens=8,
        seed=None,
        finish_reason="stop",
        trainable=True,
        untrainable_reason=None,
        started_at=WINDOW.start + timedelta(seconds=number),
        latency_ms=1,
    )


async def _old_checkpoint(store: Store, settings: Settings) -> None:
    """Policy 1, which never served: it goes when the window's own is deployed."""
    directory = settings.home.checkpoints / "2025-11-14T0800-e1"
    directory.mkdir(parents=True)
    (directory / "weights").write_bytes(b"old")
    await store.pool.execute(
        "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri, base_model,"
        " window_id, batch_id) VALUES (1, 0, 'full', $1, 'tiny', '2025-11-14T08:00', 'old')",
        str(directory),
    )
