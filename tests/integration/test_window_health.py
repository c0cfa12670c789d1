"""Health of a window's data in Postgres, on its page, in `babylon windows` and in /metrics."""

import logging
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from babylon.core.errors import WindowNotReadyError
from babylon.core.settings_loading import load_settings
from babylon.core.windows import Clock, Window, WindowState
from babylon.deployment.admin.app import admin_app
from babylon.deployment.admin.flow_metrics import flow_metrics
from babylon.deployment.change import checks_under
from babylon.quality.quality_page import quality_markdown
from babylon.stages.checked_rows import CheckedRows
from babylon.stages.collect import collect_window
from babylon.stages.dropout import thin_window
from babylon.stages.freshness import stale_play
from babylon.stages.pending import pending_windows
from babylon.stages.readiness import window_reports
from babylon.stages.score import score_window
from babylon.stages.validate import validate_window
from babylon.store.flow_state import read_flow_state
from babylon.store.holds import end_hold, hold, running_hold
from babylon.store.scores import list_scores
from babylon.store.window_health import WindowHealth, figures_before, get_health, store_health
from babylon.store.windows import claim_window, set_state
from tests.integration.game import WINDOW, claim, insert_real_window

USUAL = {"trajectories": 40, "agents": 40, "outcomes": 12, "rejected_share": 0.02}


async def measured(store, windows, minutes=60, **changes):
    """Health of the hours before the real window."""
    for n in range(1, windows + 1):
        window = Window(WINDOW.start - timedelta(minutes=minutes * n), minutes)
        held = await claim_window(store, window, owner="test", lease_s=60)
        health = WindowHealth(
            window_id=window.id, minutes=minutes, figures={**USUAL, "agents": 40 - n % 2, **changes}
        )
        await store_health(store, held, health)


async def validate(store, settings):
    collected = await collect_window(store, settings.home, await claim(store), WINDOW)
    return await validate_window(store, settings, collected)


async def test_validation_measures_the_window_and_names_what_is_unusual(store, settings, caplog):
    await insert_real_window(store)
    await measured(store, 30)
    await measured(store, 3, minutes=15, agents=1)  # of another length: not compared
    with caplog.at_level(logging.WARNING, "babylon"):
        await validate(store, settings)
    health = await get_health(store, WINDOW.id)
    assert health.figures["rejected_share"] == pytest.approx(10 / 15)
    assert (health.figures["agents"], health.figures["outcomes"]) == (10, 3)
    assert health.figures["calls_without_tokens_share"] == 1
    assert [alarm.figure for alarm in health.alarms] == ["agents", "rejected_share", "outcomes"]
    assert health.figures["malformed_share"] == 1  # their replies are words, not orders
    said = "agents that played: 10; in the last 30 windows 39.5, mostly 39 to 40"
    assert health.alarms[0].reason == said
    assert f"window {WINDOW.id}: {said}" in caplog.text
    reports = await window_reports(store, settings.windows, CheckedRows(settings.quality))
    assert reports[-1].alarms[0] == said and not reports[0].alarms
    page = quality_markdown(WINDOW.id, 5, [], health)
    assert f"**Alarm:** {said}" in page and "| 56.21 | 0 | 0.6667 |" in page
    assert "without market outcomes" not in page
    assert len(await figures_before(store, WINDOW, 7)) == 7


async def test_a_refused_window_is_measured_too(store, settings):
    await insert_real_window(store)
    await store.pool.execute("""UPDATE market_outcomes SET "windowId" = '2025-11-13T09:00'""")
    with pytest.raises(WindowNotReadyError):
        await validate(store, settings.replace(windows={"min_agents": 6}))
    health = await get_health(store, WINDOW.id)
    assert health.figures["trajectories"] == 15 and not health.alarms
    page = quality_markdown(WINDOW.id, 5, [], health)
    assert "Judged without market outcomes" in page


@pytest.mark.parametrize(
    ("hours", "minutes", "stale"),
    [(1.9, 60, False), (2.1, 60, True), (2.1, 240, False), (8.1, 240, True), (169, 60, False)],
)
def test_play_that_no_longer_arrives_is_named(hours, minutes, stale):
    windows = load_settings(windows={"minutes": minutes}).windows
    said = stale_play(WINDOW.start, windows, Clock(now=WINDOW.start + timedelta(hours=hours)))
    assert bool(said) is stale
    assert not stale or said.startswith("no play began since 2025-11-14T09:00 UTC, ")
    assert stale_play(None, windows, Clock(now=WINDOW.start)) == ""


async def test_prometheus_reads_the_flow_from_the_admin_api(store, settings):
    await insert_real_window(store)
    await measured(store, 30)
    await validate(store, settings)
    held = await claim(store)
    metrics = {"market_outcomes": 0, "avg_reward": 0.25, "promoted": True, "scorer": "heuristic"}
    await set_state(store, held, WindowState.TRAINED)
    await set_state(store, held, WindowState.DEPLOYED, metrics=metrics)
    app = admin_app(store, settings.home, checks_under(settings))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://admin"
    ) as client:
        answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for found in text_string_to_metric_families(answer.text)
        for sample in found.samples
    }
    assert samples["babylon_windows", "deployed"] == 1
    assert samples["babylon_windows", "claimed"] == samples["babylon_windows_leased",] == 30
    assert samples["babylon_windows_without_truth",] == 1
    newest = datetime(2025, 11, 14, 9, 34, 0, 2000, tzinfo=UTC).timestamp()
    assert samples["babylon_newest_play_timestamp_seconds",] == newest
    finished = samples["babylon_window_finished_timestamp_seconds",]
    assert abs(finished - datetime.now(UTC).timestamp()) < 600
    assert samples["babylon_window_metric", "avg_reward"] == 0.25
    assert samples["babylon_window_metric", "promoted"] == 1
    assert ("babylon_window_metric", "scorer") not in samples
    assert samples["babylon_window_figure", "outcomes"] == 3
    alarms = {key[1]: value for key, value in samples.items() if key[0] == "babylon_window_alarm"}
    raised = {name for name, value in alarms.items() if value}
    assert raised == {"agents", "rejected_share", "outcomes"}
    assert alarms["pnl_median_usd"] == alarms["calls_without_tokens_share"] == 0


async def test_an_empty_system_has_metrics_too(store):
    text = flow_metrics(await read_flow_state(store), publishes=False).decode()
    assert 'babylon_windows{state="deployed"} 0.0' in text and "timestamp" not in text


async def test_reward_hacking_holds_training_until_a_person_ends_it(store, settings):
    """All of a sudden all hold: the window teaches nothing, until someone has looked at it."""
    await insert_real_window(store)
    usual = {"rejected_share": 10 / 15, "outcomes": 3, "hold_share": 0.1, "actions": 200}
    await measured(store, 12, **usual)
    asked = settings.replace(windows={"min_agents": 2})
    collected = await collect_window(store, asked.home, await claim(store), WINDOW)
    thinned = thin_window(asked, await validate_window(store, asked, collected))
    with pytest.raises(WindowNotReadyError, match="reward hacking: share of actions that hold"):
        await score_window(store, asked, thinned)
    assert await list_scores(store, WINDOW.id) == []
    held = await running_hold(store)
    assert held.author == "reward watch" and WINDOW.id in held.reason
    assert await pending_windows(store, asked.windows, asked.quality) == []
    assert await end_hold(store, "operator")
    scored = await score_window(store, asked, thinned)
    assert scored.artifact.rows == 5 and await running_hold(store) is None
    figures = (await get_health(store, WINDOW.id)).figures
    assert figures["score_pnl_correlation"] > 0.9 and figures["unscored_share"] == 0


@pytest.mark.parametrize("skipped", [False, True])
async def test_a_change_that_a_person_let_train_holds_no_later_window(store, settings, skipped):
    """Else a change that lasts would need a person in each of the next windows."""
    await insert_real_window(store)
    usual = {"rejected_share": 10 / 15, "outcomes": 3, "hold_share": 0.1, "actions": 200}
    await measured(store, 30, **usual)
    before = Window(WINDOW.start - timedelta(hours=1), 60).id
    await store.pool.execute(
        "UPDATE babylon.window_health SET figures = figures || $2 WHERE window_id = $1",
        before,
        {"hold_share": 1.0},
    )
    await hold(store, "reward watch", f"window {before} looks like reward hacking")
    await end_hold(store, "operator")
    if skipped:
        await store.pool.execute(
            "UPDATE babylon.windows SET state = 'skipped', lease_until = NULL WHERE window_id = $1",
            before,
        )
    asked = settings.replace(windows={"min_agents": 2})
    collected = await collect_window(store, asked.home, await claim(store), WINDOW)
    thinned = thin_window(asked, await validate_window(store, asked, collected))
    if skipped:
        with pytest.raises(WindowNotReadyError, match="reward hacking: share of actions that hold"):
            await score_window(store, asked, thinned)
        return
    assert (await score_window(store, asked, thinned)).artifact.rows == 5
    assert "hold_share" in [alarm.figure for alarm in (await get_health(store, WINDOW.id)).alarms]
    assert await running_hold(store) is None


async def test_without_the_hold_the_alarm_stops_nothing(store, settings):
    await insert_real_window(store)
    await measured(store, 12, rejected_share=10 / 15, hold_share=0.1, actions=200)
    asked = settings.replace(windows={"min_agents": 2}, scoring={"hold_on_hacking": False})
    collected = await collect_window(store, asked.home, await claim(store), WINDOW)
    thinned = thin_window(asked, await validate_window(store, asked, collected))
    assert (await score_window(store, asked, thinned)).artifact.rows == 5
    assert "hold_share" in [alarm.figure for alarm in (await get_health(store, WINDOW.id)).alarms]
