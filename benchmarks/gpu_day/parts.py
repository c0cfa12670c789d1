"""The parts of the day, each in a process of its own: ``python -m benchmarks.gpu_day.parts``."""

import argparse
import asyncio
import json
import os
import random
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import aiohttp
import torch

from babylon.core.api_keys import local_key
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.core.trajectories import Trajectory
from babylon.deployment.change import ChangeRequest, checks_under
from babylon.deployment.checks.check_policy import check_policy
from babylon.deployment.replace import replace_champion
from babylon.evaluation.arena.engine_players import engine_table, entered
from babylon.evaluation.arena.match import compare
from babylon.evaluation.arena.players import policy_player
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.evaluation.arena.worlds import simulated
from babylon.game.fleet.fleet_plan import FleetPlan
from babylon.game.fleet.spawn import run_fleet
from babylon.game.market.scenario import STARTER
from babylon.game.market.transcripts import scripted_chats
from babylon.ops.prefect_env import prepare_inline_run
from babylon.policies.checkpoint_files import checkpoint_digest
from babylon.scoring.scorer import Score
from babylon.serving.serve import serving
from babylon.store import Store, open_store
from babylon.store.gateways import wait_until_loaded
from babylon.store.policies import champion, ensure_base, get_policy
from babylon.store.proposals import proposed
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.train_report import TrainReport
from babylon.training.likelihood import free_memory
from babylon.training.trainable import TuningOptions
from babylon.training.update import update_checkpoint
from benchmarks.gpu_day.head import measure_heads
from benchmarks.gpu_day.models import (
    PolicyKind,
    Size,
    policy_kind,
    save_adapter,
    save_policy,
    training_rows,
    window_of,
)
from benchmarks.gpu_day.peers import measure_peers
from benchmarks.trainer.contenders.babylon_session import window_work
from benchmarks.trainer.flops import flop, matmul_rate
from benchmarks.trainer.models import shape_of

# published dense bf16 peaks, FLOP/s
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
HOUR = datetime(2026, 1, 1, tzinfo=UTC)
LOAD_S = 500.0
Figures = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A directory for the part's files, and whether it only rehearses."""

    directory: Path
    rehearse: bool

    def kind(self, size: Size) -> PolicyKind:
        return policy_kind(size, rehearse=self.rehearse)


def device_name() -> str:
    """Return the GPU's name, or ``cpu``."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def train(place: Place, size: Size) -> Figures:
    """Measure updates through ``update_checkpoint``; the first one compiles the kernels."""
    kind = place.kind(size)
    window = window_of(kind, rehearse=place.rehearse)
    rows, parent = training_rows(window), save_policy(kind, place.directory / "v0")
    free_memory()
    options = TuningOptions(base_precision=kind.precision)
    figures: Figures = {}
    for name, iterations in (("first", 1), ("next", 3)):
        config = TrainerConfig(
            iterations=iterations, trajectories_per_step=len(rows), learning_rate=1e-6, stop_kl=1e3
        )
        started = time.monotonic()
        update = update_checkpoint(
            parent, rows, place.directory / name, tuning=kind.tuning, config=config, options=options
        )
        figures[f"{name}_update_s"] = time.monotonic() - started
    report, work = cast(TrainReport, update.report), window_work(window)
    seconds = report.training_s / 3
    return figures | {
        "device": device_name(),
        "s_an_iteration": seconds,
        "unique_tokens_per_s": report.unique_tokens_per_s,
        "flat_tokens_per_s": report.flat_tokens / seconds,
        "unique_token_mfu": flop(shape_of(kind.config), work, kind.tuning) / seconds / _peak(),
        "max_tokens": report.max_tokens,
        "oom_halvings": report.oom_halvings,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0,
    }


def _peak() -> float:
    """Return the published peak, or where none is known, the rate of a matrix product, FLOP/s."""
    known = [peak for key, peak in PEAKS.items() if key in device_name()]
    return known[0] if known else matmul_rate(512)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@asynccontextmanager
async def stack(
    place: Place, kind: PolicyKind, *, adapter: bool = True, **groups: Any
) -> AsyncIterator[tuple[Store, Settings]]:
    """Serve a base model as policy 0 by Postgres, engine and gateway; policy 1 is an adapter."""
    base = save_policy(kind, place.directory / "v0")
    ports = _free_ports(3)
    real = bool(os.environ.get("VLLM_PYTHON")) and not place.rehearse
    settings = load_settings(
        home=place.directory / "home",
        database={"url": None},
        model={"base": str(base)},
        serving={
            "engine": "vllm" if real else "embedded",
            "endpoint": f"http://127.0.0.1:{ports[0]}",
            "engine_port": ports[1],
            "admin_port": ports[2],
            # the trainer and the checks need the rest
            "vllm_args": "--gpu-memory-utilization 0.4 --max-model-len 8192" if real else "",
        },
        **groups,
    )
    async with open_store(settings) as store:
        digest = checkpoint_digest(str(base))
        await ensure_base(store, uri=str(base), base_model=str(base), digest=digest)
        if adapter:
            path = save_adapter(base, kind, place.directory / "v1")
            await store.pool.execute(
                "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri,"
                " base_model, digest) VALUES (1, 0, 'lora', $1, $3, $2)",
                str(path),
                checkpoint_digest(str(path)),
                str(base),
            )
        free_memory()
        async with serving(settings.serving, settings.home, settings.environment()):
            yield store, settings


async def parity(place: Place) -> Figures:
    """Run the checks before deployment, which compare engine and trainer on the same tokens."""
    async with stack(place, place.kind("0.5b")) as (store, settings):
        async with proposed(store, 1, "gpu-day", "measured"):
            gateways = await wait_until_loaded(store, 1, LOAD_S)
            both = await get_policy(store, 1), await get_policy(store, 0)
            checked = await check_policy(store, settings, *both, gateways)
        found = {one.name: one for one in checked.checks}
        agrees = found["agrees"]
        if not agrees.passed:
            raise RuntimeError(f"engine and trainer disagree: {agrees.figures}")
        return {
            "engine": settings.serving.engine,
            "refused": checked.reason or "no",  # another check: the weights are random
            **{f"gap_{name}": value for name, value in agrees.figures.items()},
        }


async def swap(place: Place) -> Figures:
    """Change the route to and fro while streams run; no answer may fail or mix versions."""
    swaps, streams = (2, 4) if place.rehearse else (20, 64)
    async with stack(place, place.kind("0.5b")) as (store, settings):
        stop, answers = asyncio.Event(), dict.fromkeys(("whole", "broken"), 0)
        load = [asyncio.create_task(_stream(settings, stop, answers)) for _ in range(streams)]
        took = []
        for number in range(swaps):
            request = ChangeRequest(author="gpu-day", reason="swap", force=True, drain_s=0)
            started = time.monotonic()
            await replace_champion(store, checks_under(settings), (number + 1) % 2, request)
            took.append(time.monotonic() - started)
        stop.set()
        await asyncio.gather(*load)
    if answers["broken"] or not answers["whole"]:
        raise RuntimeError(f"answers under swaps: {answers}")
    return {
        "engine": settings.serving.engine,
        "swaps": swaps,
        "first_s": took[0],
        "median_s": statistics.median(took[1:]),
        "most_s": max(took[1:]),
        "answers": answers["whole"],
    }


async def _stream(settings: Settings, stop: asyncio.Event, answers: dict[str, int]) -> None:
    key, url = local_key(settings.home.root), f"{settings.serving.endpoint}/v1/chat/completions"
    body = {
        "model": settings.model.name,
        "messages": [{"role": "user", "content": "m1 0.50"}],
        "max_tokens": 64,
        "stream": True,
    }
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
        while not stop.is_set():
            async with session.post(url, json=body) as response:
                text = await response.text()
            whole = response.status == 200 and text.rstrip().endswith("data: [DONE]")
            answers["whole" if whole else "broken"] += 1


async def gate(place: Place) -> Figures:
    """Play a match through the engine, and ask the same questions twice in another order."""
    worlds = 32 if place.rehearse else 2048
    questions = 16 if place.rehearse else 512
    async with stack(place, place.kind("0.5b")) as (store, settings):
        torch_bytes = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        model = settings.model.name
        players = [
            policy_player(store.home, await get_policy(store, version), 0) for version in (0, 1)
        ]
        made = simulated(unseen_scenarios("gpu-day", "0", worlds, STARTER))
        async with entered(store, model, 0, players) as (old, new):
            started = time.monotonic()
            match = await compare(old, new, made)
            seconds = time.monotonic() - started
        chats = [chat[:-1] for chat, _ in zip(scripted_chats(3), range(questions), strict=False)]
        async with engine_table(store, model, [0]) as table:
            assert table is not None
            seeds = list(range(len(chats)))
            first = await table.answers(0, chats, seeds)
            order = random.Random(0).sample(seeds, len(seeds))
            again = await table.answers(0, [chats[i] for i in order], order)
        equal = statistics.fmean(first[i] == reply for i, reply in zip(order, again, strict=True))
    return {
        "engine": settings.serving.engine,
        "worlds": match.looks[-1].scenarios,
        "ruling": match.ruling,
        "s": seconds,
        "replies_per_s": 2 * match.looks[-1].scenarios * STARTER.ticks / seconds,
        "equal_replies": equal,
        "model_bytes_in_this_process": torch_bytes,
    }


def by_length(trajectories: Sequence[Trajectory]) -> list[Score]:
    """Score by the length of the replies, which differ also where random weights answer."""
    lengths = [sum(len(call.response) for call in one.calls) for one in trajectories]
    most = max(lengths) or 1
    return [Score(value=length / most) for length in lengths]


async def hour(place: Place, size: Size) -> Figures:
    """Play an hour, train it, check the update, and put it in force whatever the match says."""
    kind = place.kind(size)
    groups = {
        "training": {
            "tuning": kind.tuning,
            "base_precision": kind.precision,
            "iterations": 2,
            "learning_rate": 1e-6,
        },
        "scoring": {"scorer": "benchmarks.gpu_day.parts:by_length"},
        "evaluation": {"scenarios": 32, "rules": "starter"},
        "windows": {"grace_s": 0},
    }
    async with stack(place, kind, adapter=False, **groups) as (store, settings):
        prepare_inline_run(settings.home, settings.prefect)
        from babylon.flows.train_window import train_window  # Prefect reads its settings at import

        agents, minutes = (10, 12) if place.rehearse else (50, 60)
        plan = FleetPlan(start=HOUR, duration_min=minutes, agents=agents, agents_per_scenario=10)
        started = time.monotonic()
        fleet = await run_fleet(store, settings, plan, "llm")
        played = time.monotonic()
        overrides = {
            **groups,
            "home": settings.home.root,
            "database": {"url": None},
            "model": {"base": settings.model.base},
            "serving": settings.serving.model_dump(exclude_defaults=True),
        }
        result = await train_window("2026-01-01T00:00", overrides)
        trained = time.monotonic()
        version = await store.pool.fetchval("SELECT max(policy_version) FROM babylon.policies")
        if not version:
            raise RuntimeError(f"the window trained nothing: {result.status}, {result.reason}")
        serves, _ = await champion(store)
        if serves.policy_version != version:
            request = ChangeRequest(author="gpu-day", reason="measured", force=True, drain_s=0)
            await replace_champion(store, checks_under(settings), version, request)
        return {
            "engine": settings.serving.engine,
            "device": device_name(),
            "trajectories": fleet.trajectories,
            "play_s": played - started,
            "collect_to_verdict_s": trained - played,
            "served_s": time.monotonic() - trained,
            "window": result.status,
        }


PARTS: dict[str, Callable[[Place], Figures | Awaitable[Figures]]] = {
    "train-0.5b": lambda place: train(place, "0.5b"),
    "train-7b": lambda place: train(place, "7b"),
    "peers-0.5b": lambda place: measure_peers(place.kind("0.5b"), rehearse=place.rehearse),
    "peers-7b": lambda place: measure_peers(place.kind("7b"), rehearse=place.rehearse),
    "head": lambda place: measure_heads(rehearse=place.rehearse),
    "parity": parity,
    "swap": swap,
    "gate": gate,
    "hour-0.5b": lambda place: hour(place, "0.5b"),
    "hour-7b": lambda place: hour(place, "7b"),
}


def main() -> None:
    """Run one part and write its figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("figures", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        sys.exit("no CUDA device: run with --rehearse to try tiny sizes on the CPU")
    directory = Path(tempfile.mkdtemp(prefix="gpu-day-"))
    try:
        made = PARTS[options.part](Place(directory=directory, rehearse=options.rehearse))
        found = asyncio.run(_awaited(made)) if isinstance(made, Awaitable) else made
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    options.figures.write_text(json.dumps(found, indent=1) + "\n")


async def _awaited(made: Awaitable[Figures]) -> Figures:
    return await made


if __name__ == "__main__":
    main()
