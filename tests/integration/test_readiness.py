"""What ``windows list`` and ``windows check`` know, on a real Postgres."""

import asyncio
import json
from datetime import UTC, datetime, timedelta

import pytest

from babylon.cli import main
from babylon.core.errors import DatabaseError
from babylon.core.windows import Clock, WindowState
from babylon.stages.readiness import window_reports
from babylon.store import open_store
from babylon.store.late import store_collected
from babylon.store.rejections import Rejection, replace_rejections
from babylon.store.windows import claim_window, set_state
from tests.integration.game import WINDOW, claim, insert_real_window, insert_trajectories

AFTER = datetime(2025, 11, 14, 12, 0, tzinfo=UTC)
DURING = datetime(2025, 11, 14, 9, 40, tzinfo=UTC)


async def reports(store, settings, **options):
    now = options.pop("now", AFTER)
    if hours := options.pop("lookback_hours", None):
        options["since"] = now - timedelta(hours=hours)
    settings = settings.replace(windows={"min_agents": options.pop("min_agents", 3)})
    found = await window_reports(store, settings, clock=Clock(now=now), **options)
    return {report.window_id: report for report in found}


async def test_the_real_window_is_ready_with_its_five_agents_and_ten_rejections(store, settings):
    await insert_real_window(store)
    (report,) = (await reports(store, settings, min_agents=5)).values()
    assert report.window_id == "2025-11-14T09:00"
    assert (report.trajectories, report.eligible, report.agents) == (15, 5, 5)
    assert report.rejected == {"no_llm_call": 10}
    assert (report.state, report.ready, report.age_s) == (WindowState.READY, True, 2 * 3600)
    assert await store.pool.fetchval("SELECT count(*) FROM babylon.rejections") == 0


async def test_an_unfinished_window_or_too_few_agents_are_missing_something(store, settings):
    await insert_real_window(store)
    (report,) = (await reports(store, settings, min_agents=6, now=DURING)).values()
    assert (report.state, report.ready, report.age_s) == (WindowState.OPEN, False, -20 * 60)
    assert report.missing == (
        "the window is not over: it ends at 2025-11-14T10:00:00 UTC",
        "5 eligible agents, minimum is 6",
    )


async def test_a_window_in_work_or_done_is_not_ready_and_trained_rows_do_not_count(store, settings):
    await insert_real_window(store)
    held = await claim(store)
    now = datetime.now(UTC)
    (working,) = (await reports(store, settings, now=now)).values()
    assert working.missing == ("test is training it now",)

    await store.pool.execute(
        'INSERT INTO babylon.trained SELECT "trajectoryId", "windowId", \'b\' FROM trajectories'
    )
    await set_state(store, held, WindowState.TRAINED)
    await set_state(store, held, WindowState.DEPLOYED)
    (done,) = (await reports(store, settings, now=now)).values()
    assert (done.trained, done.eligible, done.late, done.ready) == (15, 0, 0, False)
    assert done.missing[0] == "already trained: the window is deployed"


async def test_a_half_finished_window_says_how_to_go_on(store, settings):
    await insert_real_window(store)
    await set_state(store, await claim(store), WindowState.TRAINED)
    (held,) = (await reports(store, settings)).values()
    assert held.leased and held.missing[0] == "test is training it now"
    await store.pool.execute("UPDATE babylon.windows SET lease_until = now()")
    (report,) = (await reports(store, settings)).values()
    assert not report.leased and not report.ready
    (missing,) = report.missing
    assert missing == "trained but not validated: train --window 2025-11-14T09:00 goes on there"


async def test_rows_find_their_window_and_those_without_one_are_shown(store, settings):
    await insert_trajectories(
        store,
        {"trajectoryId": "t1"},
        {"trajectoryId": "t2", "windowId": None, "startTime": "2025-11-14T08:59:59.999"},
        {"trajectoryId": "t3", "startTime": "2025-11-14T10:00"},
        {"trajectoryId": "t4", "windowId": "lunch"},
    )
    found = await reports(store, settings)
    assert list(found) == ["2025-11-14T08:00", "2025-11-14T09:00", "lunch"]
    assert found["2025-11-14T08:00"].eligible == 1
    assert found["2025-11-14T09:00"].rejected == {"other_window": 1}
    assert not found["lunch"].ready
    assert "'lunch' is not YYYY-MM-DDTHH:MM" in found["lunch"].missing[0]


@pytest.mark.parametrize("moment", ["infinity", "-infinity", "9999-12-31T23:30", "0044-03-15 BC"])
@pytest.mark.parametrize("window_id", [None, "2025-11-14T09:00", "9999-12-31T23:00"])
async def test_a_date_that_no_calendar_has_is_rejected_and_harms_no_other_row(
    moment, window_id, store, settings
):
    beyond = {"trajectoryId": "beyond", "windowId": window_id, "startTime": moment}
    endless = {"trajectoryId": "endless", "endTime": moment}
    await insert_trajectories(store, {"trajectoryId": "sound"}, beyond, endless)
    found = await reports(store, settings, lookback_hours=1000)
    report = found["2025-11-14T09:00"]
    assert report.eligible == 1
    assert sum(r.rejected.get("other_window", 0) for r in found.values()) == (
        1 if moment.startswith(("-", "0")) else 2  # what is long ago is not looked at
    )


async def test_a_lookback_shows_the_newest_windows_only(store, settings):
    await insert_trajectories(
        store,
        {"trajectoryId": "t1"},
        {
            "trajectoryId": "t2",
            "windowId": "2025-11-14T07:00",
            "startTime": "2025-11-14T07:30",
        },
    )
    assert list(await reports(store, settings)) == ["2025-11-14T07:00", "2025-11-14T09:00"]
    assert list(await reports(store, settings, lookback_hours=3)) == ["2025-11-14T09:00"]
    assert await reports(store, settings, lookback_hours=1) == {}


async def test_a_database_without_the_game_is_said_to_be_one(store, settings):
    await store.pool.execute("DROP TABLE market_outcomes")
    async with open_store(settings) as bare:
        with pytest.raises(DatabaseError, match=r"no game tables .* point DATABASE_URL"):
            await window_reports(bare, settings)


async def test_a_closing_window_says_until_when(store, settings):
    await insert_real_window(store)
    closing = AFTER.replace(hour=10, second=30)
    (report,) = (await reports(store, settings, now=closing)).values()
    assert report.state == WindowState.CLOSING
    assert report.missing == (
        "rows may still arrive, until 2025-11-14T10:01:00 UTC (WINDOW_GRACE_SECONDS)",
    )


async def test_a_stage_of_a_run_that_died_is_shown_and_can_be_taken_up(store, settings):
    await insert_real_window(store)
    held = await claim(store)
    await set_state(store, held, WindowState.VALIDATED)
    (working,) = (await reports(store, settings)).values()
    assert (working.state, working.owner, working.ready) == (WindowState.VALIDATED, "test", False)
    await store.pool.execute("UPDATE babylon.windows SET lease_until = now()")
    (dead,) = (await reports(store, settings)).values()
    assert (dead.state, dead.owner, dead.attempts) == (WindowState.VALIDATED, None, 1)
    assert dead.ready


async def test_a_failed_window_says_when_it_is_tried_again(store, settings):
    await insert_real_window(store)
    await set_state(store, await claim(store), WindowState.FAILED, reason="loss is nan")
    (report,) = (await reports(store, settings)).values()
    again = f"{report.retry_at:%Y-%m-%dT%H:%M:%S}"
    assert report.reason == "loss is nan"
    assert report.missing == (
        f"tried 1 time without success, again at {again} UTC (train --window at once)",
    )
    (later,) = (await reports(store, settings, now=report.retry_at)).values()
    assert later.ready and not later.resting


async def test_the_game_cannot_name_a_recipe(store, settings):
    await insert_trajectories(store, {"trajectoryId": "t1", "windowId": "2025-11-14T09:00+x"})
    (report,) = (await reports(store, settings)).values()
    assert not report.ready and report.rejected == {"other_window": 1}
    assert "'2025-11-14T09:00+x' is not YYYY-MM-DDTHH:MM" in report.missing[0]


@pytest.fixture
def command(settings, monkeypatch, capsys):
    """``babylon windows ...`` on this test's database → exit code and what it printed."""
    monkeypatch.setenv("DATABASE_URL", settings.database.url.get_secret_value())
    monkeypatch.setenv("BABYLON_HOME", str(settings.home.root))

    async def run(*arguments):
        with pytest.raises(SystemExit) as left:
            await asyncio.to_thread(main, ["windows", *arguments])
        return left.value.code, capsys.readouterr().out

    monkeypatch.setattr("babylon.cli.signal.signal", lambda *_: None)  # not outside the main thread
    return run


async def test_list_shows_state_owner_age_counts_and_reasons(store, command):
    await insert_real_window(store)
    held = await claim_window(store, WINDOW, owner="box:7:abc", lease_s=60)
    code, text = await command("list")
    assert code == 0
    (row,) = [line for line in text.splitlines() if "claimed" in line]
    name, state, _, unit, owner, *counts = row.split()
    assert (name, state, unit, owner) == (WINDOW.id, "claimed", "d", "box:7")
    assert counts == ["15", "5", "0", "10", "0"]
    assert f"{WINDOW.id}: box:7:abc is training it now; rejected 10 no_llm_call" in text

    await set_state(store, held, WindowState.FAILED, reason="loss is nan")
    _, text = await command("list", "--json")
    (window,) = json.loads(text)["windows"]
    assert (window["state"], window["reason"]) == ("failed", "loss is nan")
    assert (window["owner"], window["attempts"], window["ready"]) == (None, 1, False)
    assert window["age_s"] > 0 and window["retry_at"] and window["rejected"] == {"no_llm_call": 10}


async def test_check_ends_in_one_clear_line_and_an_exit_code(store, command):
    assert (await command("check"))[0] == 1
    await insert_real_window(store)
    code, text = await command("check")
    assert (code, text.splitlines()[-1]) == (0, f"READY FOR TRAINING: {WINDOW.id}")
    code, text = await command("check", "--min-agents", "6")
    assert code == 1 and "5 eligible agents, minimum is 6" in text
    assert text.splitlines()[-1].startswith("NOT READY: no recorded window waits with 6")
    code, text = await command("check", "--min-agents", "6", "--json")
    assert (code, json.loads(text)["ready"]) == (1, False)


async def test_late_trajectories_are_counted_and_named(store, command):
    await insert_trajectories(store, {"trajectoryId": "one"})
    held = await claim(store)
    await store_collected(store, held, [])
    await set_state(store, held, WindowState.TRAINED)
    await set_state(store, held, WindowState.REJECTED)
    _, text = await command("list", "--include-late")
    assert "1 late (`train --recipe NAME --include-late` trains them)" in text
    assert "Late trajectories" in text and "one" in text.split("Late trajectories")[1]
    _, text = await command("list", "--include-late", "--json")
    (late,) = json.loads(text)["late"]
    assert (late["trajectory_id"], late["admitted_to"]) == ("one", None)
    _, text = await command("check", "--json")
    assert json.loads(text)["late"] == {WINDOW.id: 1}


async def test_check_and_show_name_trajectories_that_were_refused_and_why(store, settings, command):
    await insert_real_window(store)
    code, text = await command("check", "--min-agents", "6")
    assert code == 1 and f"{WINDOW.id}: 5 eligible agents, minimum is 6; rejected 10:\n" in text
    assert "    10 no_llm_call\n        247649324240994304: 3 steps without an LLM call\n" in text
    _, text = await command("check", "--json")
    ((reason,),) = json.loads(text)["rejected"].values()
    assert (reason["reason"], reason["count"], len(reason["samples"])) == ("no_llm_call", 10, 3)

    code, text = await command("show", WINDOW.id, "--min-actions", "1000")
    assert code == 0 and "0 eligible agents" in text and "5 too_few_actions" in text
    _, text = await command("show", WINDOW.id, "--json")
    shown = json.loads(text)
    assert (shown["ready"], shown["rejections"]) == (True, [reason])
    code, text = await command("show", "2025-11-14T10:00", "--json")
    assert code == 1 and "nothing was recorded in window" in json.loads(text)["error"]


async def test_show_tells_what_the_run_of_a_finished_window_refused_and_what_came_late(
    store, settings, command
):
    await insert_trajectories(store, {"trajectoryId": "late"})
    held = await claim(store)
    await store_collected(store, held, ["other"])
    refused = Rejection(trajectory_id="other", reason="no_response", detail="stepsJson[0]")
    await replace_rejections(store, held, [refused])
    await set_state(store, held, WindowState.TRAINED)
    await set_state(store, held, WindowState.DEPLOYED)
    code, text = await command("show", WINDOW.id)
    assert code == 0 and "    1 no_response\n        other: stepsJson[0]\n" in text
    assert "late" in text.split("Late trajectories")[1]
    _, text = await command("show", WINDOW.id, "--json")
    shown = json.loads(text)
    assert [r["samples"][0]["trajectory_id"] for r in shown["rejections"]] == ["other"]
    assert [row["trajectory_id"] for row in shown["late_trajectories"]] == ["late"]
