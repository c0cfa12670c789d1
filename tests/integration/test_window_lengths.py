"""Windows of other lengths than the game's hours, on its real rows, and changes of the length."""

from datetime import UTC, datetime

import msgspec
import pytest

from babylon.core.artifacts import read_artifact
from babylon.core.errors import AlreadyTrainedError
from babylon.core.windows import Clock, Window, WindowState, parse_window_id, window_at
from babylon.stages.checked_rows import CheckedRows
from babylon.stages.claim import claimed, commit_collected
from babylon.stages.collect import collect_window
from babylon.stages.pending import pending_windows
from babylon.stages.readiness import window_reports
from babylon.stages.validate import validate_window
from babylon.store.late import list_late, note_late
from babylon.store.policies import commit_policy, ensure_base
from babylon.store.windows import claim_window, set_state
from tests.integration.game import insert, insert_real_window, insert_trajectories, real_rows

PLAY = datetime(2025, 11, 14, 9, 2, tzinfo=UTC)
AFTER = Clock(now=datetime(2025, 11, 16, tzinfo=UTC))
MORE = {"trajectoryId": "more"}


def of_length(settings, minutes):
    return settings.replace(windows={"minutes": minutes})


async def collected_ids(store, settings, window):
    claim = await claim_window(store, window, owner="test", lease_s=60)
    collected = await collect_window(store, settings.home, claim, window)
    frame = read_artifact(settings.home, collected.artifact, ["trajectory_id"])
    return collected, frame["trajectory_id"].to_list()


async def train(store, settings, window):
    """Collect a window and commit a policy that consumes all of it."""
    await ensure_base(store, uri="base", base_model="base", digest="d")
    async with claimed(store, settings.windows, window) as claim:
        collected = await collect_window(store, settings.home, claim, window)
        await commit_collected(store, collected)
        ids = read_artifact(settings.home, collected.artifact, ["trajectory_id"])[
            "trajectory_id"
        ].to_list()
        await commit_policy(
            store, claim, parent_version=0, kind="lora", uri=window.key, base_model="base",
            batch_id=f"window-{window.key}", trajectory_ids=ids, metrics={}, digest="d",
        )  # fmt: skip
        await set_state(store, claim, WindowState.DEPLOYED)
    return ids


@pytest.mark.parametrize(
    ("minutes", "rows", "agents"), [(15, 10, 5), (60, 15, 5), (240, 15, 5), (1440, 15, 5)]
)
async def test_the_games_hourly_rows_are_valid_in_windows_of_any_length(
    minutes, rows, agents, store, settings
):
    await insert_real_window(store)
    settings, window = of_length(settings, minutes), window_at(PLAY, minutes)
    collected, ids = await collected_ids(store, settings, window)
    validated = await validate_window(store, settings, collected)
    assert (len(ids), validated.agents) == (rows, agents)
    assert validated.rejected == {"no_llm_call": rows - agents}
    reports = {
        report.window_id: report
        for report in await window_reports(
            store, settings.windows, CheckedRows(settings.quality), clock=AFTER
        )
    }
    assert reports[window.id].rejected == {"no_llm_call": rows - agents}
    assert sum(report.trajectories for report in reports.values()) == 15
    outcomes = read_artifact(settings.home, collected.artifact, ["outcomes_json"])["outcomes_json"][
        0
    ]
    assert {row["stockTicker"] for row in msgspec.json.decode(outcomes)} >= {"TeslAI", "OpnAI"}


async def test_outcomes_of_hours_are_joined_over_a_long_window(store, settings):
    await insert_real_window(store)
    tesla, _, question = real_rows("market_outcomes")
    later = {"windowId": "2025-11-14T11:00", "createdAt": "2025-11-14T12:05"}
    await insert(
        store,
        "market_outcomes",
        [
            {**tesla, **later, "id": "1", "startPrice": 390, "endPrice": 441.32, "newsEvents": "n"},
            {**question, **later, "id": "2", "outcome": None, "finalProbability": 0.5},
            {**tesla, **later, "id": "3", "windowId": "2025-11-14T12:00", "endPrice": 1},
        ],
    )
    collected, _ = await collected_ids(store, settings, window_at(PLAY, 240))
    text = read_artifact(settings.home, collected.artifact, ["outcomes_json"])["outcomes_json"][0]
    prices, opn, asked = msgspec.json.decode(text)
    assert (prices["startPrice"], prices["endPrice"], prices["newsEvents"]) == (
        401.2,
        441.32,
        ["n"],
    )
    assert prices["changePercent"] == 10.0 and opn["endPrice"] == 155.9
    assert (asked["outcome"], asked["finalProbability"]) == ("YES", 0.5)


async def test_a_short_window_has_the_games_hour_but_no_other_windows_tracker(store, settings):
    at = "2025-11-14T09:20"
    await insert_trajectories(store, {"trajectoryId": "t1", "startTime": at, "endTime": at})
    tesla, opn, _ = real_rows("market_outcomes")
    own = {"id": "2025-11-14T09:00-price-OpnAI"}  # of our tracker: until 09:15
    await insert(store, "market_outcomes", [tesla, {**opn, **own}])
    window = parse_window_id("2025-11-14T09:15", 15)
    collected, _ = await collected_ids(store, settings, window)
    text = read_artifact(settings.home, collected.artifact, ["outcomes_json"])["outcomes_json"][0]
    assert [row["stockTicker"] for row in msgspec.json.decode(text)] == ["TeslAI"]


async def test_no_trajectory_is_trained_twice_when_the_length_changes(store, settings):
    """Twelve plays an hour over six hours; the length of windows changes after each training."""
    hours = [f"2025-11-14T{hour:02}" for hour in range(6, 12)]
    await insert_trajectories(
        store,
        *(
            {"trajectoryId": f"{hour}:{m:02}", "windowId": f"{hour}:00", "startTime": f"{hour}:{m}"}
            for hour in hours
            for m in range(0, 60, 5)
        ),
    )
    trained = []
    for minutes in (60, 240, 15, 1440, 60, 240, 15):
        waiting = await waiting_windows(store, of_length(settings, minutes))
        for window in waiting[:1]:
            trained += await train(store, settings, window)
    assert len(trained) == len(set(trained)) > 24
    assert await store.pool.fetchval("SELECT count(*) FROM babylon.trained") == len(trained)
    while waiting := await waiting_windows(store, of_length(settings, 60)):
        trained += await train(store, settings, waiting[0])
    assert len(trained) == len(set(trained)) == 72  # and none is out of reach


async def waiting_windows(store, settings):
    """The windows with rows, whether enough agents played or not."""
    reports = await window_reports(
        store, settings.windows, CheckedRows(settings.quality), clock=AFTER
    )
    return [
        parse_window_id(report.window_id, report.minutes)
        for report in reports
        if report.eligible and report.state == WindowState.READY
    ]


async def test_a_window_that_was_scored_before_the_change_cannot_train_again(store, settings):
    await insert_trajectories(store, MORE)
    old = parse_window_id("2025-11-14T09:00", 60)
    held = await claim_window(store, old, owner="test", lease_s=60)
    await set_state(store, held, WindowState.SCORED)
    assert await train(store, settings, window_at(PLAY, 240)) == ["more"]
    with pytest.raises(AlreadyTrainedError, match="holds a trajectory that was trained before"):
        await commit_policy(
            store, held, parent_version=0, kind="lora", uri="u", base_model="base",
            batch_id="again", trajectory_ids=["more"], metrics={}, digest="d",
        )  # fmt: skip
    assert await store.pool.fetchval("SELECT count(*) FROM babylon.trained") == 1


async def test_rows_behind_a_finished_shorter_window_keep_its_length(store, settings):
    """The long window has the id of a finished one, so that it can never be claimed."""
    await insert_trajectories(
        store,
        {"trajectoryId": "first", "windowId": None, "startTime": "2025-11-14T08:30"},
        {"trajectoryId": "second", "windowId": None, "startTime": "2025-11-14T10:30"},
    )
    await train(store, settings, parse_window_id("2025-11-14T08:00"))
    four = of_length(settings, 240)
    reports = await window_reports(store, four.windows, CheckedRows(four.quality), clock=AFTER)
    assert [(r.window_id, r.minutes, r.eligible) for r in reports] == [
        ("2025-11-14T08:00", 60, 0),
        ("2025-11-14T10:00", 60, 1),
    ]
    assert await pending_windows(store, four.windows, four.quality, clock=AFTER) == []
    again = Window(datetime(2025, 11, 14, 8, tzinfo=UTC), 240, recipe="four-hours")
    assert (await collected_ids(store, four, again))[1] == ["second"]


async def test_rows_of_a_finished_window_are_late_and_of_no_other_length(store, settings):
    await insert_trajectories(store, MORE)
    await train(store, settings, parse_window_id("2025-11-14T09:00", 60))
    sound = real_rows("trajectories")[0]
    late = {**sound, "id": "late", "trajectoryId": "late"}
    await insert(store, "trajectories", [late])
    assert (await collected_ids(store, settings, window_at(PLAY, 240)))[1] == []
    four = of_length(settings, 240)
    reports = await window_reports(store, four.windows, CheckedRows(four.quality), clock=AFTER)
    assert {r.window_id: r.late for r in reports} == {"2025-11-14T08:00": 0, "2025-11-14T09:00": 1}
    assert await note_late(store) == 1  # a list of windows writes nothing
    assert [row.window_id for row in await list_late(store)] == ["2025-11-14T09:00"]
    assert await note_late(store) == 0
