"""Market outcomes that come late: the bounded wait, and judging again."""

import json
import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from babylon.core.artifacts import read_artifact
from babylon.core.errors import TrainingError, WindowError, WindowNotReadyError
from babylon.core.windows import Clock, WindowState, parse_window_id, window_at
from babylon.flows.continuous import continuous
from babylon.ops.pages.stage_lines import stage_lines
from babylon.quality.quality_page import quality_markdown
from babylon.stages.checked_rows import CheckedRows
from babylon.stages.claim import claimed, commit_scored
from babylon.stages.collect import collect_window
from babylon.stages.dropout import thin_window
from babylon.stages.judge_again import judge_again
from babylon.stages.pending import window_to_train
from babylon.stages.readiness import window_reports
from babylon.stages.score import score_window
from babylon.stages.validate import validate_window
from babylon.store.connection import read_clock
from babylon.store.flow_state import read_flow_state
from babylon.store.late import list_late
from babylon.store.market_outcomes import awaits_outcomes
from babylon.store.published import withhold
from babylon.store.scores import list_scores
from babylon.store.window_health import get_health
from babylon.store.windows import claim_window, get_window, release, set_state
from babylon.tasks.collect import collect
from tests.integration.game import WINDOW, claim, insert, insert_real_window, real_rows

TESLA = {**real_rows("market_outcomes")[0], "createdAt": "2025-11-14T10:00"}
HOUR = "2025-11-14T09:00"
EARLIER = {**TESLA, "id": "earlier", "windowId": "2025-11-14T07:00"}


def after(window, seconds):
    return window.end + timedelta(seconds=seconds)


async def waits(store, window, seconds, wait_s=1800):
    return await awaits_outcomes(store, window, after(window, seconds), wait_s)


async def test_a_window_waits_for_its_outcomes_until_the_bound(store, settings):
    assert await waits(store, WINDOW, 1) == ""  # nobody ever wrote outcomes here
    await insert(store, "market_outcomes", [EARLIER])
    assert "until 2025-11-14T10:30:00 UTC (OUTCOMES_WAIT_SECONDS)" in await waits(store, WINDOW, 1)
    assert await waits(store, WINDOW, 1799) and await waits(store, WINDOW, 1800) == ""
    assert await waits(store, WINDOW, -1) == "" and await waits(store, WINDOW, 1, 0) == ""
    assert await waits(store, WINDOW, 3599, 7200) and await waits(store, WINDOW, 3600, 7200) == ""
    await insert(store, "market_outcomes", [TESLA])
    assert await waits(store, WINDOW, 1) == ""


@pytest.mark.parametrize(
    ("window_id", "minutes", "outcome", "arrived"),
    [
        ("2025-11-14T08:00", 240, {"windowId": "2025-11-14T09:00"}, False),  # two hours are missing
        ("2025-11-14T08:00", 240, {"windowId": "2025-11-14T11:00"}, True),
        ("2025-11-14T08:00", 240, {"id": "2025-11-14T08:00-price-T"}, True),  # of our tracker
        ("2025-11-14T09:15", 15, {"windowId": HOUR}, True),
        ("2025-11-14T09:15", 15, {"windowId": HOUR, "id": f"{HOUR}-price-T"}, False),
    ],
)  # fmt: skip
async def test_a_window_of_another_length_waits_for_its_last_hour(
    window_id, minutes, outcome, arrived, store
):
    window = parse_window_id(window_id, minutes)
    await insert(store, "market_outcomes", [EARLIER, {**TESLA, "windowId": window_id, **outcome}])
    assert (await waits(store, window, 1) == "") is arrived


async def test_a_window_that_waits_is_closing_and_holds_no_claim(store, settings):
    last = window_at((await read_clock(store)).now, 15).previous()
    await insert(store, "market_outcomes", [EARLIER])
    moments = {"startTime": f"{last.start:%FT%T}", "endTime": f"{last.start:%FT%T}"}
    sound = {**real_rows("trajectories")[0], "windowId": None, **moments}
    await insert(store, "users", real_rows("users"))
    await insert(store, "trajectories", [sound])
    patient = settings.replace(windows={"minutes": 15, "min_agents": 2, "grace_s": 0})
    clock = Clock(now=last.end + timedelta(seconds=10))
    (report,) = await window_reports(
        store, patient.windows, CheckedRows(patient.quality), clock=clock
    )
    assert report.state == WindowState.CLOSING
    assert report.missing[0].startswith("its market outcomes are not written")
    if (await read_clock(store)).now < last.end + timedelta(minutes=14):
        with pytest.raises(WindowNotReadyError, match=f"{last.id} is closing: its market outcomes"):
            async with claimed(store, patient.windows, last):
                pass
        assert await get_window(store, last.id) is None
    at_once = patient.replace(windows={"outcomes_wait_s": 0})
    (report,) = await window_reports(
        store, at_once.windows, CheckedRows(at_once.quality), clock=clock
    )
    assert report.state == WindowState.READY
    async with claimed(store, at_once.windows, last):
        pass


async def test_continuous_training_looks_every_minute_while_truth_is_awaited(
    store, settings, monkeypatch
):
    looks = []

    async def nap(moment):
        looks.append((moment - datetime.now(UTC)).total_seconds())
        if len(looks) == 2:
            raise TrainingError("enough")
        monkeypatch.setattr("babylon.flows.continuous.awaits_outcomes", awaited)

    async def awaited(*_):
        return "its market outcomes are not written"

    monkeypatch.setattr("babylon.flows.continuous.sleep_until", nap)
    overrides = {
        "database": {"url": settings.database.url.get_secret_value()},
        "home": settings.home.root,
        "windows": {"minutes": 1440, "lease_s": 3000},
    }
    with pytest.raises(TrainingError, match="enough"):
        await anext(continuous(overrides))
    assert looks[1] <= 60


async def test_a_collection_without_outcomes_says_so(store, settings, caplog):
    await insert_real_window(store)
    await give_outcomes_to_another_window(store)
    held = await claim(store)
    with caplog.at_level(logging.WARNING, "babylon.flows"):
        await collect.fn(settings, held, WINDOW)
    assert f"window {WINDOW.id} has no market outcomes and is judged without" in caplog.text


async def test_a_task_without_markets_is_not_told_that_outcomes_are_missing(
    store, settings, caplog
):
    await insert_real_window(store)
    await store.pool.execute("DELETE FROM market_outcomes")
    held = await claim(store)
    with caplog.at_level(logging.INFO, "babylon.flows"):
        collected = await collect.fn(settings, held, WINDOW)
    thinned = thin_window(settings, await validate_window(store, settings, collected))
    scored = await score_window(store, settings, thinned)
    health = await get_health(store, WINDOW.id)
    assert "outcomes" not in caplog.text and scored.outcomes is None
    assert not [line for line in stage_lines(collected) if "outcomes" in line]
    assert "without market outcomes" not in quality_markdown(WINDOW.id, 5, [], health)
    await set_state(store, held, WindowState.VALIDATED)
    await commit_scored(store, scored)
    assert (await read_flow_state(store)).without_truth == 0


async def test_a_live_game_that_never_wrote_outcomes_is_told_that_they_are_missing(store, settings):
    """The job that writes them may be broken from the first day on."""
    await insert_real_window(store)
    await store.pool.execute("DELETE FROM market_outcomes")
    live = replace(store, game_tables_ours=False)
    collected = await collect_window(live, settings.home, await claim(store), WINDOW)
    assert collected.outcomes == 0


async def give_outcomes_to_another_window(store):
    await store.pool.execute(
        """UPDATE market_outcomes SET "windowId" = '2025-11-13T09:00', id = id || '-earlier'"""
    )


async def judged_without_truth(store, settings):
    """The real window, trained on scores that were given before its outcomes came."""
    await insert_real_window(store)
    await give_outcomes_to_another_window(store)
    held = await claim(store)
    collected = await collect_window(store, settings.home, held, WINDOW)
    thinned = thin_window(settings, await validate_window(store, settings, collected))
    scored = await score_window(store, settings, thinned)
    await set_state(store, held, WindowState.VALIDATED)
    await commit_scored(store, scored)
    await store.pool.execute(
        'INSERT INTO babylon.trained SELECT "trajectoryId", "windowId", \'b\' FROM trajectories'
    )
    await set_state(store, held, WindowState.TRAINED)
    await set_state(store, held, WindowState.DEPLOYED)


def by_truth(trajectories, context):
    """A scorer that sees whether outcomes were known."""
    texts = read_artifact(context.settings.home, context.artifact, ["knowledge_json"])[
        "knowledge_json"
    ]
    known = [bool(json.loads(text)["market_outcomes"]) for text in texts]
    return [1.0 + i if truth else 0.0 for i, truth in enumerate(known)]


async def with_truth(store, settings):
    groups = (settings.home, settings.windows, settings.quality)
    return await judge_again(store, *groups, WINDOW.id, partial(score_window, settings=settings))


async def test_outcomes_that_came_late_change_the_scores_and_train_nothing(store, settings):
    settings = settings.replace(scoring={"scorer": f"{__name__}:by_truth"})
    await judged_without_truth(store, settings)
    (report,) = await window_reports(store, settings.windows, CheckedRows(settings.quality))
    assert report.outcomes == 0
    first = await list_scores(store, WINDOW.id)
    trained = await store.pool.fetch("SELECT * FROM babylon.trained ORDER BY 1")
    with pytest.raises(WindowNotReadyError, match="has no market outcomes yet"):
        await with_truth(store, settings)

    await insert(store, "market_outcomes", real_rows("market_outcomes"))
    again = await with_truth(store, settings)
    assert again.window_id == "2025-11-14T09:00+judged-again"
    assert (again.outcomes, again.trajectories, again.changed) == (3, 5, 5)
    assert (again.before, again.after) == (0.0, 3.0)
    assert await list_scores(store, WINDOW.id) == first
    assert len(await list_scores(store, again.window_id)) == 5
    assert await store.pool.fetch("SELECT * FROM babylon.trained ORDER BY 1") == trained
    row = await get_window(store, again.window_id)
    assert (row.state, row.metrics["market_outcomes"]) == (WindowState.SKIPPED, 3)
    assert await with_truth(store, settings) == again  # as often as outcomes arrive
    with pytest.raises(WindowError, match="nothing of them is trained"):
        await window_to_train(store, settings.windows, settings.quality, again.window_id)
    reports = await window_reports(store, settings.windows, CheckedRows(settings.quality))
    assert "nothing of it is trained" in reports[-1].missing[0]
    longer = settings.replace(windows={"minutes": 240})  # no window of this length starts at 09:00
    assert await with_truth(store, longer) == again
    await withhold(store, "agent", real_rows("trajectories")[0]["agentId"], "asked to")
    assert (await with_truth(store, settings)).trajectories == 4


async def test_the_scores_of_a_recipe_that_waits_for_training_are_not_replaced(store, settings):
    await judged_without_truth(store, settings)
    await insert(store, "market_outcomes", real_rows("market_outcomes"))
    recipe = replace(WINDOW, recipe="second")
    held = await claim_window(store, recipe, owner="me", lease_s=60)
    await set_state(store, held, WindowState.SCORED)
    await release(store, held, "an experiment runs", "waits")
    groups = (settings.home, settings.windows, settings.quality)
    score = partial(score_window, settings=settings)
    with pytest.raises(WindowError, match="is a recipe's: only the play of 2025-11-14T09:00"):
        await judge_again(store, *groups, recipe.key, score)
    row = await get_window(store, recipe.key)
    assert row.state == WindowState.SCORED


async def test_judging_again_admits_no_late_row(store, settings):
    """``INCLUDE_LATE`` in the settings is for recipes, which train late rows."""
    await judged_without_truth(store, settings)
    await store.pool.execute("UPDATE babylon.windows SET collected_at = now()")
    await insert(store, "market_outcomes", real_rows("market_outcomes"))
    late = {**real_rows("trajectories")[0], "id": "late", "trajectoryId": "late"}
    await insert(store, "trajectories", [late])
    await with_truth(store, settings.replace(windows={"include_late": True}))
    admitted = {row.trajectory_id: row.admitted_to for row in await list_late(store)}
    assert admitted["late"] is None
