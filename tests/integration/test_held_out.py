"""The recorded play that a gate may read."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from babylon.core.artifacts import write_artifact
from babylon.core.errors import ArenaError
from babylon.core.settings import Settings
from babylon.core.trajectories import TRAJECTORY_SCHEMA, Trajectory, trajectory_row
from babylon.core.types import OffPolicy, Scored, Trained, Verdict
from babylon.core.windows import parse_window_id
from babylon.evaluation.arena import held_out
from babylon.evaluation.arena.held_out import held_out_play
from babylon.evaluation.tasks import task_gate
from babylon.store import Store
from babylon.store.lineage import windows_trained_into
from babylon.store.policies import ensure_base, get_policy
from babylon.store.published import withhold
from babylon.store.windows import claim_window
from tests.deployments import commit_under
from tests.trajectories import a_trajectory

AGENTS = ("ann", "bo", "cy")
NOON = datetime(2025, 11, 14, 12, tzinfo=UTC)


@asynccontextmanager
async def never_served(*_: object) -> AsyncIterator[tuple[None, None]]:
    """No policy is loaded."""
    yield None, None


@pytest.fixture(autouse=True)
async def base(store: Store) -> None:
    await ensure_base(store, uri="/nowhere/base", base_model="tiny")


async def trained_window(
    store: Store,
    settings: Settings,
    hour: float,
    *,
    parent: int = 0,
    state: str = "deployed",
    minutes: int = 60,
) -> Trained:
    """A window that trained a policy, with a play of each agent that dropout left out."""
    start = f"2025-11-14T{int(hour):02}:{int(60 * (hour % 1)):02}"
    window = parse_window_id(start, minutes)
    claim = await claim_window(store, window, owner="worker", lease_s=60)
    batch = f"window-{window.id}"
    version = await commit_under(
        store,
        claim,
        parent,
        kind="lora",
        uri=f"/nowhere/{hour}",
        base_model="tiny",
        batch_id=batch,
        trajectory_ids=[f"{hour}-trained"],
        metrics={},
    )
    plays = [
        a_trajectory(f"{hour}-{agent}", agent_id=agent, window_id=window.id, start=NOON, end=NOON)
        for agent in AGENTS
    ]
    rows = [trajectory_row(play, game_json="[]", knowledge_json="{}") for play in plays]
    frame = pl.DataFrame(rows, schema=TRAJECTORY_SCHEMA)
    artifact = write_artifact(settings.home, frame, window_id=window.id, stage="held-out")
    scored = Scored(
        claim=claim,
        artifact=artifact,
        held_out=artifact,
        eligible=3,
        agents=3,
        scorer="heuristic",
        avg_reward=0.0,
    )
    await store.pool.execute(
        "UPDATE babylon.windows SET scored = $2, state = $3 WHERE window_id = $1",
        window.id,
        asdict(scored),
        state,
    )
    return Trained(
        claim=claim,
        batch_id=batch,
        policy_version=version,
        parent_version=parent,
        checkpoint_uri=f"/nowhere/{hour}",
        metrics={},
    )


async def test_play_that_was_taken_down_reaches_no_gate(store: Store, settings: Settings) -> None:
    """The artifacts still hold it."""
    trained = await trained_window(store, settings, 9)
    await withhold(store, "agent", "ann", "asked for it")
    await withhold(store, "trajectory", "9-cy", "asked for it")
    found, _ = await held_out_play(store, trained)
    assert [one.trajectory_id for one in found] == ["9-bo"]
    await withhold(store, "agent", "bo", "asked for it")
    found, problem = await held_out_play(store, trained)
    assert not found and "was trained on or taken down" in problem


async def test_an_evaluator_gets_play_of_no_hour_that_the_challengers_line_was_trained_on(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that is rejected for the lack of such play is the play that judges the next."""
    got: list[str] = []

    def worlds(seed: str, count: int, recorded: Sequence[Trajectory]) -> list[object]:
        got[:] = sorted({one.window_id[11:13] for one in recorded})
        return []

    evaluator: Any = SimpleNamespace(worlds=worlds)
    monkeypatch.setattr(task_gate, "load_evaluator", lambda name: evaluator)
    monkeypatch.setattr(task_gate, "served", never_served)

    async def judged(trained: Trained) -> Verdict:
        policies = [await get_policy(store, version) for version in (0, trained.policy_version)]
        return await task_gate.task_verdict(
            store, trained, 1, *policies, None, name="desk", seed="s", budget=8, model="babylon"
        )  # fmt: skip

    first = await trained_window(store, settings, 9, state="rejected")
    rejected = await judged(first)
    assert rejected.ruling == "insufficient" and "EVALUATOR=desk made no worlds" in rejected.reason
    line = await trained_window(store, settings, 10)
    other = await trained_window(store, settings, 11, parent=line.policy_version)
    with pytest.raises(ArenaError, match="made no worlds"):  # it has play, and does not use it
        await judged(other)
    assert got == ["09"]


async def test_windows_of_one_hour_share_its_outcomes_whatever_their_length(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 45 minutes that starts at 9:45 was played from 10:00 to 10:30 too."""
    await trained_window(store, settings, 10.5, state="rejected", minutes=45)
    trained = await trained_window(store, settings, 9.75, minutes=45)
    apart = await held_out.trained_hours(store, trained)
    assert apart == {"2025-11-14T09", "2025-11-14T10"}
    assert (await held_out_play(store, trained, apart))[0] == []
    told: list[bool] = []

    def check(*about: Any) -> OffPolicy:
        told[:] = about[-1]
        return OffPolicy()

    monkeypatch.setattr(held_out, "_check", check)
    await held_out.held_out_check(store, trained, settings.training)
    assert told == [False] * len(told) and len(told) == 2 * len(AGENTS)


async def test_the_hours_of_a_line_are_read_without_the_trajectories_of_all_years(
    store: Store, settings: Settings
) -> None:
    """``trained`` has a row for each, for ever: a gate that reads them all gets slower each day."""
    first = await trained_window(store, settings, 9)
    await trained_window(store, settings, 10)
    last = await trained_window(store, settings, 11, parent=first.policy_version)
    await store.pool.execute("ALTER TABLE babylon.trained RENAME TO hidden")
    assert await windows_trained_into(store, last.policy_version) == {
        "2025-11-14T09:00",
        "2025-11-14T11:00",
    }
