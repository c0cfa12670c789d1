"""DPO through the train stage: sampled after a window, valued in the simulator, trained once."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec
import polars as pl
import pytest

from babylon.core.artifacts import write_artifact
from babylon.core.errors import WindowNotReadyError
from babylon.core.settings import Settings
from babylon.core.trajectories import Call, TrainingRow
from babylon.core.types import Scored
from babylon.core.windows import parse_window_id
from babylon.evaluation.rebuild.recorded import RecordedRow
from babylon.evaluation.rebuild.recorded_windows import played_rows
from babylon.game.fleet.fleet_plan import FleetPlan
from babylon.game.fleet.spawn import run_fleet
from babylon.game.market.scenario import STARTER
from babylon.policies.load import load_policy
from babylon.policies.tokenizer import render_prompt
from babylon.stages.train import train_window
from babylon.store import Store
from babylon.store.policies import ensure_base, get_policy
from babylon.store.replies import read_replies
from babylon.store.windows import claim_window
from tests.deciding_policy import save_deciding_policy

WINDOW = "2025-11-14T09:00"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_deciding_policy(tmp_path_factory.mktemp("deciding"))


async def recorded_fleet(store: Store, settings: Settings) -> list[RecordedRow]:
    """Rows of eight scripted agents, as the recorder writes them."""
    start = datetime(2025, 11, 14, 9, tzinfo=UTC)
    plan = FleetPlan(start=start, duration_min=6, agents=8, rules=STARTER, shared=False)
    await run_fleet(store, settings, plan, "scripted")
    rows = await played_rows(store, parse_window_id(WINDOW), apart_from=(), most=99)
    return [row for row in rows if isinstance(row, RecordedRow)]


def as_called(base: Path, rows: list[RecordedRow]) -> list[TrainingRow]:
    """The rows with exact tokens, as if the policy had said what the scripted agents did."""
    _, tokenizer = load_policy(base)
    made = []
    for row in rows:
        calls = []
        for number, step in enumerate(row.steps):
            (asked,) = step.llm_calls
            completion = tokenizer.encode(step.reply or "", add_special_tokens=False)
            calls.append(
                Call(
                    step=number,
                    messages=asked.prompt,
                    response=step.reply or "",
                    policy_version=0,
                    prompt_token_ids=tuple(render_prompt(tokenizer, list(asked.prompt))),
                    completion_token_ids=(*completion, tokenizer.eos_token_id),
                )
            )
        made.append(
            TrainingRow(
                trajectory_id=row.trajectory_id,
                agent_id=row.agent_id,
                scenario_id=row.scenario_id,
                score=0.5,  # a tie: the window teaches GRPO nothing
                calls=tuple(calls),
            )
        )
    return made


async def tied_window(store: Store, settings: Settings, base: Path) -> Scored:
    played = as_called(base, await recorded_fleet(store, settings))
    claim = await claim_window(store, parse_window_id(WINDOW), owner="test", lease_s=60)
    frame = pl.DataFrame(
        [
            {
                "trajectory_id": row.trajectory_id,
                "agent_id": row.agent_id,
                "scenario_id": row.scenario_id,
                "score": row.score,
                "calls_json": msgspec.json.encode(row.calls).decode(),
            }
            for row in played
        ]
    )
    return Scored(
        claim=claim,
        artifact=write_artifact(settings.home, frame, window_id=WINDOW, stage="scored"),
        eligible=len(played),
        agents=len(played),
        scorer="heuristic",
        avg_reward=0.5,
    )


async def test_a_window_of_ties_teaches_by_preferences(
    store: Store, settings: Settings, base: Path
) -> None:
    await ensure_base(store, uri=str(base), base_model="deciding")
    settings = settings.replace(
        training={"objective": "dpo", "iterations": 2, "learning_rate": 1e-3, "warmup_steps": 0},
        preferences={"prompts": 5, "replies": 6},
    )
    scored = await tied_window(store, settings, base)
    with pytest.raises(WindowNotReadyError, match="differing scores"):
        await train_window(store, settings.replace(training={"objective": "grpo"}), scored)

    trained = await train_window(store, settings, scored)
    assert trained.metrics["pairs"] > 0 and trained.metrics["margin_after"] > 0

    stored = await store.pool.fetch("SELECT * FROM babylon.sampled_replies ORDER BY 1, 2")
    assert len(stored) == 5 and {row["policy_version"] for row in stored} == {0}
    used = await store.pool.fetch("SELECT trajectory_id FROM babylon.trained")
    assert {row["trajectory_id"] for row in used} <= {row["trajectory_id"] for row in stored}
    # what was trained is not offered again
    left = {one.trajectory_id for one in await read_replies(store, WINDOW, 0, 1.0)}
    assert not left & {row["trajectory_id"] for row in used}
    assert (await get_policy(store, 1)).metrics["pairs"] == trained.metrics["pairs"]

    # the tokens are those of recorded prompts and of the policy: no outcome is among them
    _, tokenizer = load_policy(base)
    texts = [tokenizer.decode(row["prompt_token_ids"]) for row in stored]
    rows = await played_rows(store, parse_window_id(WINDOW), apart_from=(), most=99)
    truth = {str(key) for row in rows if isinstance(row, RecordedRow) for key in row.knowledge}
    assert truth and not any(word in text for word in truth for text in texts)
    asked = {
        "".join(str(m["content"]) for m in step.llm_calls[0].prompt)
        for row in rows
        if isinstance(row, RecordedRow)
        for step in row.steps
    }
    assert all(any(prompt.splitlines()[-1] in text for prompt in asked) for text in texts)


async def test_a_run_that_resumes_trains_on_the_same_replies(
    store: Store, settings: Settings, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ensure_base(store, uri=str(base), base_model="deciding")
    settings = settings.replace(
        training={"objective": "grpo+dpo", "iterations": 1},
        preferences={"prompts": 3, "replies": 6},
    )
    scored = await tied_window(store, settings, base)
    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr("babylon.stages.siblings.updater", _stopped)
        await train_window(store, settings, scored)
    before = await store.pool.fetch("SELECT * FROM babylon.sampled_replies ORDER BY 1, 2")
    trained = await train_window(store, settings, scored)
    assert await store.pool.fetch("SELECT * FROM babylon.sampled_replies ORDER BY 1, 2") == before
    assert trained.metrics["pairs"] > 0  # the scores tie, so the pairs teach alone


def _stopped(name: str) -> object:
    raise InterruptedError(name)
