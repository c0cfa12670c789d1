"""Whatever the rows say, validation goes on: each is accepted or has a named reason.

``FUZZ_ROWS=100000`` and ``PLANTED_ROWS=20000`` run it in full; without them the same in small.
"""

import os
from collections import Counter
from dataclasses import asdict, replace
from itertools import islice

import msgspec
import polars as pl

from babylon.core.artifacts import ArtifactWriter, iter_artifact
from babylon.core.game_rows import GAME_SCHEMA
from babylon.core.trajectories import read_trajectories
from babylon.quality.decode import MAX_DETAIL, Reason
from babylon.stages.collect import collect_window
from babylon.stages.validate import check_artifact, validate_window
from babylon.store.rejections import replace_rejections, window_rejections
from tests.faults.mutations import mutated_rows, older_row, older_step
from tests.integration.game import WINDOW, claim, insert_trajectories
from tests.unit.quality.rows import call, compact, step, steps

FUZZED = int(os.environ.get("FUZZ_ROWS", 10_000))
PLANTED = int(os.environ.get("PLANTED_ROWS", 2_000))
ONE_REASON_EACH = 100  # of so many sound rows one is bad


def collected(settings, rows):
    """The rows as the collect stage leaves them."""
    with ArtifactWriter(
        settings.home, GAME_SCHEMA, window_id=WINDOW.id, stage="collected"
    ) as writer:
        while part := list(islice(rows, 200)):
            writer.write(pl.DataFrame([asdict(row) for row in part], schema=GAME_SCHEMA))
    return writer.artifact


async def test_every_mutated_row_is_accepted_or_has_a_reason(store, settings):
    raw = collected(settings, mutated_rows(FUZZED))
    accepted, _, rejections = check_artifact(raw, WINDOW, settings.home, settings.quality)
    assert accepted.rows + len(rejections) == raw.rows == FUZZED
    kept = {name for frame in iter_artifact(settings.home, accepted) for name in decoded(frame)}
    assert kept.isdisjoint(rejection.trajectory_id for rejection in rejections)
    assert len(kept) == accepted.rows
    assert all(rejection.detail for rejection in rejections)
    assert max(len(rejection.detail) for rejection in rejections) <= MAX_DETAIL

    counts = Counter(str(rejection.reason) for rejection in rejections)
    assert set(counts) <= set(Reason)
    assert len(counts) >= 9  # the mutations reach nearly every reason
    assert 0.2 < accepted.rows / FUZZED < 0.8  # and leave enough sound, or nearly so
    await replace_rejections(store, await claim(store), rejections)
    stored = await window_rejections(store, WINDOW.id)
    assert {reason.reason: reason.count for reason in stored} == counts


def decoded(frame):
    """The ids, once all that later stages read has been read."""
    for row in frame.iter_rows(named=True):
        msgspec.json.decode(row["game_json"])
        knowledge = msgspec.json.decode(row["knowledge_json"])
        assert set(knowledge) == {"game_knowledge", "market_outcomes"}
        assert all(-1 <= r["reward"] <= 1 for r in msgspec.json.decode(row["step_rewards_json"]))
        yield row["trajectory_id"]


def test_a_window_without_sound_rows_gives_an_artifact_without_rows(settings):
    rows = (replace(older_row(), trajectory_id=f"t{n:03d}", steps_json="[]") for n in range(150))
    accepted, tally, rejections = check_artifact(
        collected(settings, rows), WINDOW, settings.home, settings.quality
    )
    assert (accepted.rows, tally.eligible_agents, len(rejections)) == (0, set(), 150)
    assert read_trajectories(settings.home, accepted) == []


def test_the_same_seed_gives_the_same_rows_and_verdicts(settings):
    first, again, other = (collected(settings, mutated_rows(400, seed)) for seed in (0, 0, 1))
    assert first == again
    assert first.sha256 != other.sha256
    assert check_artifact(first, WINDOW, settings.home, settings.quality) == check_artifact(
        again, WINDOW, settings.home, settings.quality
    )
    assert read_trajectories(
        settings.home, check_artifact(first, WINDOW, settings.home, settings.quality)[0]
    )


PENDING = {"actionType": "pending", "success": False}
UNFINISHED = [*map(older_step, range(4)), older_step(4, action=PENDING)]
BAD = {
    Reason.OTHER_WINDOW: {"windowId": "2025-11-14T11:00"},
    Reason.MALFORMED_JSON: {"stepsJson": compact(steps())[:-1]},
    Reason.MISSING_FIELD: {"stepsJson": compact([*steps(4), {"stepNumber": 4}])},
    Reason.NON_FINITE_NUMBER: {"totalReward": "NaN"},
    Reason.EMPTY_STEPS: {"stepsJson": "[]"},
    Reason.STEP_ORDER: {"stepsJson": compact([*steps(), step(4)])},
    Reason.UNFINISHED_STEP: {"windowId": None, "stepsJson": compact(UNFINISHED)},
    Reason.NO_LLM_CALL: {"stepsJson": compact([step(n, llmCalls=[]) for n in range(5)])},
    Reason.NO_RESPONSE: {"stepsJson": compact([*steps(4), step(4, llmCalls=[call(response=" ")])])},
    Reason.TOO_FEW_ACTIONS: {"stepsJson": compact(steps(4))},
}


async def test_one_bad_row_in_a_hundred_is_found_exactly(store, settings):
    sound = (
        {"stepsJson": compact(steps())},
        {"stepsJson": older_row().steps_json, "windowId": None},
    )
    reasons = list(BAD)
    planted: dict[str, str] = {}
    rows = []
    for number in range(PLANTED):
        trajectory_id = f"p{number:06d}"
        bad = number % ONE_REASON_EACH == 37
        if bad:
            reason = reasons[number // ONE_REASON_EACH % len(reasons)]
            planted[trajectory_id] = str(reason)
        changes = BAD[reason] if bad else sound[number % 2]
        rows.append({"trajectoryId": trajectory_id, **changes})
    await insert_trajectories(store, *rows)
    claimed = await claim(store)
    raw = await collect_window(store, settings.home, claimed, WINDOW)
    windows = settings.windows.model_copy(update={"min_agents": 1})  # below the limit of settings
    few = settings.model_copy(update={"windows": windows})  # all rows are one agent's
    validated = await validate_window(store, few, raw)
    found = await store.pool.fetch("SELECT trajectory_id, reason FROM babylon.rejections")
    assert {row["trajectory_id"]: row["reason"] for row in found} == planted
    assert len(planted) == PLANTED // ONE_REASON_EACH
    assert validated.artifact.rows == PLANTED - len(planted)
