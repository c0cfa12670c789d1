"""Answers of ``windows list`` and ``windows check``, on a real Postgres."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from unittest.mock import Mock

import pytest

from babylon.cli import main
from babylon.core.errors import DatabaseError
from babylon.core.types import Rejection
from babylon.core.windows import Clock, WindowState
from babylon.stages import checked_rows
from babylon.stages.checked_rows import CheckedRows
from babylon.stages.readiness import window_reports
from babylon.store import open_store
from babylon.store.late import store_collected
from babylon.store.rejections import replace_rejections
from babylon.store.windows import claim_window, set_state
from tests.integration.game import WINDOW, claim, insert_real_window, insert_trajectories

AFTER = datetime(2025, 11, 14, 12, 0, tzinfo=UTC)
DURING = datetime(2025, 11, 14, 9, 40, tzinfo=UTC)


async def reports(store, settings, **options):
    now = options.pop("now", AFTER)
    if hours := options.pop("lookback_hours", None):
        options["since"] = now - timedelta(hours=hours)
    settings = settings.replace(windows={"min_agents": options.pop("min_agents", 3)})
    found = await window_reports(
        store, settings.windows, CheckedRows(settings.quality), clock=Clock(now=now), **options
    )
    return {report.window_id: report for report in found}


async def test_the_real_window_is_ready_with_5_agents_and_10_rejections(store, settings):
    await insert_real_window(store)
    (report,) = (await reports(store, settings, min_agents=5)).values()
    assert report.window_id == "2025-11-14T09:00"
    assert (report.trajectories, report.eligible, report.agents) == (15, 5, 5)
    assert report.rejected == {"no_llm_call": 10}
    assert (report.state, report.ready, report.age_s) == (WindowState.READY, True, 2 * 3600)
    assert await store.pool.fetchval("SELECT count(*) FROM babylon.rejections") == 0


async def test_an_unfinished_window_or_too_few_agents_is_not_ready(store, settings):
    await insert_real_window(store)
    (report,) = (await reports(store, settings, min_agents=6, now=DURING)).values()
    assert (report.state, report.ready, report.age_s) == (WindowState.OPEN, False, -20 * 60)
    assert report.missing == (
        "the window is not over: it ends at 2025-11-14T10:00:00 UTC",
        "5 eligible agents, minimum is 6",
    )


async def test_a_window_in_work_or_done_is_not_ready_for_training(store, settings):
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


@pytest.mark.parametrize("scored", [{"eligible": 5}, {"eligible": 4, "judge_rejected": 1}])
async def test_a_skipped_window_is_not_tried_again_before_more_is_played(store, settings, scored):
    await insert_real_window(store)
    held = await claim(store)
    await set_state(store, held, WindowState.SKIPPED, reason="scores are equal", metrics=scored)
    (skipped,) = (await reports(store, settings)).values()
    rests, lacks = skipped.missing
    assert rests.startswith("tried 1 time without success, again at ")
    assert lacks == "scores are equal; nothing was played since (train --window tries it again)"
    await store.pool.execute("UPDATE babylon.windows SET retry_at = NULL")
    later = {"eligible": 3, "judge_rejected": 1}
    await store.pool.execute("UPDATE babylon.windows SET metrics = $1", later)
    (ready,) = (await reports(store, settings)).values()
    assert ready.ready


async def test_scores_of_an_earlier_attempt_keep_no_unscored_window_from_its_next_try(
    store, settings
):
    """The judge's budget may be spent when a window whose update failed is scored anew."""
    await insert_real_window(store)
    held = await claim(store)
    await set_state(store, held, WindowState.SCORED, metrics={"eligible": 5})
    await set_state(store, held, WindowState.FAILED, reason="loss is nan")
    again = await claim(store)
    await store_collected(store, again, [])
    await set_state(store, again, WindowState.SKIPPED, reason="the judge's budget is spent")
    (skipped,) = (await reports(store, settings, now=datetime.now(UTC))).values()
    (rests,) = skipped.missing
    assert rests.startswith("tried 2 times without success, again at ")
    (later,) = (await reports(store, settings, now=skipped.retry_at)).values()
    assert later.ready


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
        {"trajectoryId": "t5", "startTime": "infinity"},
    )
    found = await reports(store, settings)
    assert list(found) == [f"2025-11-14T{hour}:00" for hour in ("08", "09", "10")] + ["no date"]
    assert (found["2025-11-14T08:00"].eligible, found["2025-11-14T09:00"].eligible) == (1, 1)
    for hour, problem in (("09", "'lunch' is not YYYY"), ("10", "T09:00 (60 minutes) lies out")):
        (rejection,) = found[f"2025-11-14T{hour}:00"].rejections
        assert rejection.reason == "other_window" and problem in rejection.samples[0].detail
    assert not found["no date"].ready and "in no window" in found["no date"].missing[0]


@pytest.mark.parametrize("moment", ["infinity", "-infinity", "9999-12-31T23:30", "0044-03-15 BC"])
@pytest.mark.parametrize("window_id", [None, "2025-11-14T09:00", "9999-12-31T23:00"])
async def test_an_impossible_date_is_rejected_alone(moment, window_id, store, settings):
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
        {"trajectoryId": "t2", "windowId": "2025-11-14T07:00", "startTime": "2025-11-14T07:30"},
    )
    assert list(await reports(store, settings)) == ["2025-11-14T07:00", "2025-11-14T09:00"]
    assert list(await reports(store, settings, lookback_hours=3)) == ["2025-11-14T09:00"]
    assert await reports(store, settings, lookback_hours=1) == {}


async def test_a_database_without_the_game_is_said_to_be_one(store, settings):
    await store.pool.execute("DROP TABLE market_outcomes")
    async with open_store(settings) as bare:
        with pytest.raises(DatabaseError, match=r"no game tables .* point DATABASE_URL"):
            await window_reports(bare, settings.windows, CheckedRows(settings.quality))


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
    detail = report.rejections[0].samples[0].detail
    assert "'2025-11-14T09:00+x' is not YYYY-MM-DDTHH:MM" in detail


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
    lease = "UPDATE babylon.windows SET lease_until = now() + $1::int * interval '1 s'"
    await store.pool.execute(lease, -1)
    _, text = await command("list")
    assert "box:7:abc died with it: it is lost until a run takes it up" in text
    assert "is training it now" not in text
    await store.pool.execute(lease, 60)

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


async def test_ready_windows_that_no_schedule_trains_are_named_with_the_command_that_does(
    store, command, monkeypatch
):
    """After a hold or an experiment of over a week, nothing said that they wait for a hand."""
    await insert_real_window(store)
    trains = f"`babylon train --mode backfill --from {WINDOW.id} --to {WINDOW.id}`"
    for page in ("list", "check"):
        _, text = await command(page)
        assert "no schedule trains ready windows that ended over LOOKBACK_HOURS=168 ago (1)" in text
        assert trains in " ".join(text.split())
    monkeypatch.setenv("LOOKBACK_HOURS", "800000")
    for page in ("list", "check"):
        assert "no schedule" not in (await command(page))[1]


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


async def test_check_and_show_name_refused_trajectories_and_why(store, settings, command):
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


async def test_show_names_a_done_windows_refused_and_late_rows(store, settings, command):
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


async def test_a_row_is_decoded_once_until_it_changes(store, settings, monkeypatch):
    await insert_real_window(store)
    check = Mock(wraps=checked_rows.check_row)
    monkeypatch.setattr(checked_rows, "check_row", check)

    async def decoded(**quality: int) -> tuple[int, dict[str, int]]:
        check.reset_mock()
        checked = CheckedRows(settings.replace(quality=quality).quality, settings.home)
        clock = Clock(now=AFTER)
        (report,) = await window_reports(store, settings.windows, checked, clock=clock)
        return check.call_count, report.rejected

    assert await decoded() == (15, {"no_llm_call": 10})
    assert await decoded() == (0, {"no_llm_call": 10})
    await store.pool.execute(
        'UPDATE trajectories SET "stepsJson" = \'[]\', "updatedAt" = now() WHERE "trajectoryId" ='
        ' (SELECT min("trajectoryId") FROM trajectories)'
    )
    again, rejected = await decoded()
    assert again == 1 and rejected["empty_steps"] == 1
    assert (await decoded(min_actions=50))[0] == 15  # another setting of the checks


async def test_list_writes_nothing_and_pages(store, command):
    rows = [
        {
            "trajectoryId": f"t{hour}",
            "windowId": f"2025-11-14T{hour:02}:00",
            "startTime": f"2025-11-14T{hour:02}:30",
        }
        for hour in range(4, 9)
    ]
    late = {"trajectoryId": "late"}
    await insert_trajectories(store, *rows, late)
    held = await claim(store)
    await store_collected(store, held, [])
    await set_state(store, held, WindowState.TRAINED)
    database = await store.pool.fetchval("SELECT current_database()")
    await store.pool.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    _, text = await command("list", "--limit", "2", "--json")
    page = json.loads(text)
    assert [one["window_id"][11:13] for one in page["windows"]] == ["08", "09"]
    assert page["windows"][1]["late"] == 1
    _, text = await command("list", "--limit", "2", "--before", page["older_before"])
    assert "T06:00" in text and "T07:00" in text and "T08" not in text.split("older windows")[0]
    assert "older windows: babylon windows list --before 2025-11-14T06:00" in text
    _, text = await command("list", "--before", "2025-11-14T05:00", "--json")
    assert json.loads(text)["older_before"] is None
    assert await store.pool.fetchval("SELECT count(*) FROM babylon.late") == 0


async def test_show_agrees_with_list_on_a_row_that_started_elsewhere(store, command):
    elsewhere = {"trajectoryId": "t", "windowId": WINDOW.id, "startTime": "2025-11-14T12:30"}
    await insert_trajectories(store, elsewhere)
    _, text = await command("list", "--json")
    (listed,) = json.loads(text)["windows"]
    assert listed["window_id"] == "2025-11-14T12:00"  # that of its start
    code, text = await command("show", listed["window_id"], "--json")
    shown = json.loads(text)
    assert code == 0 and {name: shown[name] for name in ("trajectories", "rejected")} == {
        name: listed[name] for name in ("trajectories", "rejected")
    }


async def test_show_tells_the_attempts(store, command):
    await claim(store)
    await set_state(store, await claim(store), WindowState.FAILED, reason="no judge")
    _, text = await command("show", WINDOW.id, "--json")
    attempts = json.loads(text)["attempts"]
    assert [(one["epoch"], one["ending"]) for one in attempts] == [(1, "lost"), (2, "failed")]
    assert attempts[1]["reason"] == "no judge" and attempts[1]["began_from"] == "claimed"
    _, text = await command("show", WINDOW.id)
    assert "Attempts" in text and "no judge" in text
