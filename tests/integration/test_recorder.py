"""The recorder and the outcomes tracker against a real Postgres and the game's real rows."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import cycle
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from babylon.core.errors import DatabaseError, RecorderError, WindowError, WindowNotReadyError
from babylon.core.settings_loading import load_settings
from babylon.migrations import VERSIONS
from babylon.recorder import (
    Action,
    LlmCall,
    MarketOutcomesTracker,
    ProviderAccess,
    TrajectoryRecorder,
)
from babylon.store import Store, open_store
from tests.conftest import real_rows

START = datetime(2025, 11, 14, 9, 2, tzinfo=UTC)
WINDOW_ID = "2025-11-14T09:00"
NEXT_HOUR = datetime(2025, 11, 14, 10, tzinfo=UTC)


def _step(recorder: TrajectoryRecorder, trajectory_id: str, second: int, **changes: Any) -> int:
    fields: dict[str, Any] = {
        "environment_state": {
            "agentBalance": 1000.0, "agentPnL": 0.0, "openPositions": 0, "activeMarkets": 3,
        },
        "provider_accesses": [
            ProviderAccess(provider_name="market_data", data={"price": 1.0}, purpose="look")
        ],
        "llm_calls": [
            LlmCall(
                model="babylon",
                system_prompt="You trade.",
                user_prompt="Price $1.",
                response="BUY",
                reasoning="cheap",
                temperature=0.7,
                max_tokens=150,
                purpose="action",
                action_type="BUY_SHARES",
            )
        ],
        "action": Action(
            action_type="BUY_SHARES", success=True, parameters={"amount": 5}, result={"shares": 9}
        ),
        "reward": 0.25,
        "at": START + timedelta(seconds=second),
    }  # fmt: skip
    return recorder.step(trajectory_id, **{**fields, **changes})


async def _record(store: Store, trajectory_id: str = "t1") -> None:
    recorder = TrajectoryRecorder(store)
    recorder.start("agent-1", at=START, trajectory_id=trajectory_id)
    assert recorder.next_step(trajectory_id) == 0
    assert [_step(recorder, trajectory_id, second) for second in range(2)] == [0, 1]
    failed = Action(action_type="SELL_SHARES", success=False, parameters={}, error="no position")
    _step(recorder, trajectory_id, 2, action=failed, reward=-0.125, llm_calls=[])
    await recorder.finish(
        trajectory_id, final_balance=1012.5, final_pnl=12.5, at=START + timedelta(seconds=3)
    )


async def test_rows_have_the_columns_keys_and_types_of_the_games_own(store: Store) -> None:
    await _record(store)
    row = dict(await store.pool.fetchrow("SELECT * FROM trajectories") or {})
    real = real_rows("trajectories")[0]
    assert row.keys() == real.keys()
    not_null = {name for name, value in real.items() if value is not None}
    assert {name for name, value in row.items() if value is not None} == not_null
    for name in ("metricsJson", "metadataJson", "rewardComponentsJson"):
        assert list(json.loads(row[name])) == list(json.loads(real[name]))
    assert _shape(json.loads(row["stepsJson"])[0]) == _shape(json.loads(real["stepsJson"])[0])

    call = dict(await store.pool.fetchrow('SELECT * FROM llm_call_logs ORDER BY "callId"') or {})
    real_call = real_rows("llm_call_logs")[0]
    assert call.keys() == real_call.keys()
    assert {name for name in call if call[name] is not None} == {
        name for name in real_call if real_call[name] is not None
    }
    assert _shape(json.loads(call["messagesJson"])) == _shape(json.loads(real_call["messagesJson"]))


def _shape(value: Any) -> Any:
    """The keys of objects, whatever their order; free-form parts count as one."""
    if isinstance(value, dict):
        free = {"data", "parameters", "result"}
        return {key: None if key in free else _shape(part) for key, part in value.items()}
    return [_shape(part) for part in value] if isinstance(value, list) else None


async def test_values_are_what_was_recorded(store: Store) -> None:
    await _record(store)
    row = await store.pool.fetchrow("SELECT * FROM trajectories")
    assert row is not None
    assert (row["windowId"], row["scenarioId"], row["windowHours"]) == (WINDOW_ID, WINDOW_ID, 1)
    assert (row["startTime"], row["durationMs"]) == (datetime(2025, 11, 14, 9, 2), 3000)
    assert row["episodeId"] == f"{WINDOW_ID}-1763110923000"
    assert (row["totalReward"], row["episodeLength"], row["tradesExecuted"]) == (0.375, 3, 2)
    assert json.loads(row["metricsJson"]) == {
        "episodeLength": 3,
        "finalStatus": "completed",
        "finalBalance": 1012.5,
        "finalPnL": 12.5,
        "tradesExecuted": 2,
        "postsCreated": 0,
        "errorCount": 1,
    }
    calls = await store.pool.fetch('SELECT "callId", metadata FROM llm_call_logs ORDER BY 1')
    assert [tuple(call) for call in calls] == [("t1-call-0-0", "{}"), ("t1-call-1-0", "{}")]


async def test_a_trajectory_is_written_whole_or_not_and_may_be_finished_again(store: Store) -> None:
    recorder = TrajectoryRecorder(store)
    trajectory_id = recorder.start("agent-1", at=START)
    _step(recorder, trajectory_id, 1)
    await store.pool.execute("ALTER TABLE llm_call_logs RENAME TO away")
    with pytest.raises(Exception, match="llm_call_logs"):
        await recorder.finish(trajectory_id, at=START)
    assert await store.pool.fetchval("SELECT count(*) FROM trajectories") == 0
    await store.pool.execute("ALTER TABLE away RENAME TO llm_call_logs")
    await recorder.finish(trajectory_id, at=START)
    assert await store.pool.fetchval("SELECT count(*) FROM trajectories") == 1
    with pytest.raises(RecorderError, match="call start first"):
        await recorder.finish(trajectory_id)


async def test_a_trajectory_may_be_finished_months_later(store: Store) -> None:
    recorder = TrajectoryRecorder(store)
    trajectory_id = recorder.start("agent-1", at=START)
    _step(recorder, trajectory_id, 1)
    await recorder.finish(trajectory_id, at=START + timedelta(days=90))
    assert await store.pool.fetchval('SELECT "durationMs" FROM trajectories') == 2**31 - 1


async def test_the_same_trajectory_twice_is_an_error(store: Store) -> None:
    await _record(store)
    with pytest.raises(DatabaseError, match="'t1' is stored already"):
        await _record(store)


async def test_a_trajectory_ends_where_its_window_ends(store: Store) -> None:
    recorder = TrajectoryRecorder(store, minutes=15)
    trajectory_id = recorder.start("agent-1", at=START)
    window = recorder.window(trajectory_id)
    assert (window.id, window.end) == (WINDOW_ID, START.replace(minute=15))
    _step(recorder, trajectory_id, 60)
    for wrong in (window.end, START + timedelta(seconds=59)):
        with pytest.raises(WindowError, match="finish the trajectory and start another"):
            _step(recorder, trajectory_id, 0, at=wrong)
    with pytest.raises(RecorderError, match="no time zone"):
        _step(recorder, trajectory_id, 0, at=datetime(2025, 11, 14, 9, 5))
    assert recorder.next_step(trajectory_id) == 1


async def test_window_ids_are_utc_whatever_zone_the_time_comes_in(store: Store) -> None:
    from zoneinfo import ZoneInfo

    recorder = TrajectoryRecorder(store, clock=lambda: START.astimezone(ZoneInfo("Asia/Tokyo")))
    trajectory_id = recorder.start("agent-1")
    await recorder.finish(trajectory_id)
    row = await store.pool.fetchrow('SELECT "windowId", "startTime" FROM trajectories')
    assert tuple(row or ()) == (WINDOW_ID, datetime(2025, 11, 14, 9, 2))


async def test_a_foreign_game_records_known_users(blank_database_url: str, tmp_path: Path) -> None:
    game = await asyncpg.connect(blank_database_url)
    await game.execute((VERSIONS / "0001_game_tables.sql").read_text())
    settings = load_settings(database={"url": blank_database_url}, home=tmp_path)
    async with open_store(settings, migrate=True) as store:
        assert not store.game_tables_ours
        with pytest.raises(DatabaseError, match="'agent-1' is not a user of this game"):
            await _record(store)
        await game.execute("INSERT INTO \"User\" (id) VALUES ('agent-1')")
        await _record(store)
        assert await game.fetchval("SELECT count(*) FROM llm_call_logs") == 2
    await game.close()


async def test_a_recorder_needs_the_game_tables(blank_database_url: str, tmp_path: Path) -> None:
    game = await asyncpg.connect(blank_database_url)
    await game.execute("CREATE TABLE something_else (id int)")
    await game.close()
    settings = load_settings(database={"url": blank_database_url}, home=tmp_path)
    async with open_store(settings, migrate=True) as store:
        for kind in (TrajectoryRecorder, MarketOutcomesTracker):
            with pytest.raises(DatabaseError, match=r"no game tables .trajectories"):
                kind(store)


def _tracker(store: Store) -> MarketOutcomesTracker:
    tracker = MarketOutcomesTracker(store, clock=lambda: NEXT_HOUR)
    for minute, price in ((59, 388.75), (1, 401.2), (30, 500.0)):
        tracker.price("TeslAI", price, at=START.replace(minute=minute))
    tracker.price("TeslAI", 1.0, at=NEXT_HOUR)
    tracker.probability("m1", "Will it?", 0.9, at=START.replace(minute=50))
    tracker.probability("m1", "Will it?", 0.6, at=START.replace(minute=55))
    tracker.probability("m1", "Will it?", 0.1, at=NEXT_HOUR)
    tracker.probability("m2", "Still open?", 0.5, at=START)
    tracker.resolve("m1", "YES", at=START.replace(minute=58))
    return tracker


async def test_outcomes_follow_time_order_and_the_probability_is_that_of_yes(store: Store) -> None:
    assert await _tracker(store).write(WINDOW_ID) == 3
    price, question, still_open = await store.pool.fetch(
        "SELECT * FROM market_outcomes ORDER BY id"
    )
    assert dict(price).keys() == real_rows("market_outcomes")[0].keys()
    assert [float(price[name]) for name in ("startPrice", "endPrice", "changePercent")] == [
        401.2, 388.75, -3.1,
    ]  # fmt: skip
    assert (price["stockTicker"], price["sentiment"]) == ("TeslAI", "BEARISH")
    assert (question["predictionMarketId"], question["question"]) == ("m1", "Will it?")
    assert (question["outcome"], float(question["finalProbability"])) == ("YES", 0.6)
    assert (still_open["predictionMarketId"], still_open["question"]) == ("m2", "Still open?")
    assert (still_open["outcome"], float(still_open["finalProbability"])) == (None, 0.5)


async def test_writing_again_replaces_ones_own_rows_and_leaves_others_alone(store: Store) -> None:
    await store.pool.execute(
        'INSERT INTO market_outcomes (id, "windowId", "stockTicker", "endPrice")'
        " VALUES ('theirs', $1, 'TeslAI', 7)",
        WINDOW_ID,
    )
    tracker = _tracker(store)
    await tracker.write(WINDOW_ID)
    tracker.resolve("m1", "NO", at=START.replace(minute=59))
    await tracker.write(WINDOW_ID)
    rows = await store.pool.fetch(
        'SELECT id, "endPrice", outcome FROM market_outcomes ORDER BY "endPrice" NULLS LAST, id'
    )
    assert [tuple(row) for row in rows] == [
        ("theirs", 7, None),
        (f"{WINDOW_ID}-question-m1", None, "NO"),
        (f"{WINDOW_ID}-question-m2", None, None),
    ]


async def test_outcomes_of_an_unfinished_window_are_not_written(store: Store) -> None:
    tracker = MarketOutcomesTracker(store, clock=lambda: NEXT_HOUR - timedelta(seconds=1))
    with pytest.raises(WindowNotReadyError, match="ends at 10:00 UTC, it is 09:59:59"):
        await tracker.write(WINDOW_ID)


@pytest.mark.parametrize("price", [0.0, -1.0, float("nan"), 1e9, 0.004])
async def test_impossible_observations_are_refused(store: Store, price: float) -> None:
    tracker = MarketOutcomesTracker(store)
    with pytest.raises(RecorderError, match="price of X"):
        tracker.price("X", price)
    with pytest.raises(RecorderError, match=r"P\(YES\) of m"):
        tracker.probability("m", "?", 1.5)
    with pytest.raises(RecorderError, match="'m' is unknown"):
        tracker.resolve("m", "YES")
    with pytest.raises(RecorderError, match="longer than 20 characters"):
        tracker.price("X" * 21, 1.0)


async def test_a_step_that_comes_during_the_finish_is_refused_and_not_lost(store: Store) -> None:
    recorder = TrajectoryRecorder(store)
    name = recorder.start("agent-1", at=START)
    _step(recorder, name, 1)
    finish = asyncio.create_task(recorder.finish(name, at=START + timedelta(seconds=3)))
    await asyncio.sleep(0)  # it waits for the database
    with pytest.raises(RecorderError, match="is not open"):
        _step(recorder, name, 2)
    await finish
    assert await store.pool.fetchval('SELECT "episodeLength" FROM trajectories') == 1


async def test_ids_are_checked_before_a_step_is_recorded_under_them(store: Store) -> None:
    """A finish that fails on an id fails each time, and the play is lost."""
    recorder = TrajectoryRecorder(store)
    for ids in ({"agent_id": "a\ud800"}, {"scenario_id": "s\ud800"}, {"trajectory_id": "t\ud800"}):
        with pytest.raises(RecorderError, match=r"id '\w\\ud800' is not UTF-8"):
            recorder.start(**{"agent_id": "agent-1", **ids}, at=START)
    name = recorder.start("agent\0", at=START)
    _step(recorder, name, 1)
    await recorder.finish(name, at=START + timedelta(seconds=3))
    assert await store.pool.fetchval('SELECT "agentId" FROM trajectories') == "agent\ufffd"


async def test_no_name_keeps_the_other_observations_from_being_saved(store: Store) -> None:
    tracker = MarketOutcomesTracker(store)
    for refused in (
        lambda: tracker.price("X\ud800", 1.0, at=START),
        lambda: tracker.probability("m\ud800", "?", 0.5, at=START),
        lambda: tracker.probability("m", "?\ud800", 0.5, at=START),
        lambda: tracker.resolve("m", "YES", question="?\ud800", at=START),
    ):
        with pytest.raises(RecorderError, match="is not UTF-8"):
            refused()
    tracker.price("X\0", 1.0, at=START)
    tracker.probability("m\0", "Will it?", 0.5, at=START)
    tracker.resolve("m\0", "YES", at=START)
    assert await tracker.write(WINDOW_ID) == 2
    told = 'SELECT coalesce("stockTicker", "predictionMarketId"), question FROM market_outcomes'
    rows = {tuple(row) for row in await store.pool.fetch(told)}
    assert rows == {("X\ufffd", None), ("m\ufffd", "Will it?")}


@pytest.mark.parametrize("outcome", ["yes", True, None])
async def test_an_outcome_in_other_words_is_refused_and_not_taken_for_no(
    store: Store, outcome: Any
) -> None:
    tracker = MarketOutcomesTracker(store)
    with pytest.raises(RecorderError, match=r"outcome of m is a \w+ other than 'YES' and 'NO'"):
        tracker.resolve("m", outcome, question="?")


_OUTCOMES = """
    SELECT id, "stockTicker", "startPrice", "endPrice", "changePercent", sentiment, question,
        outcome, "finalProbability"
    FROM market_outcomes ORDER BY id
"""


async def _outcomes(store: Store) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in await store.pool.fetch(_OUTCOMES)]


def _observe(trackers: list[MarketOutcomesTracker]) -> None:
    """An hour of two tickers and a question, each observation by the next tracker in turn."""
    turn = cycle(trackers)
    for minute in (31, 2, 58, 17, 44, 3):
        at = START.replace(minute=minute)
        for ticker in ("TeslAI", "OpnAI"):
            next(turn).price(ticker, 100.0 + minute + len(ticker), at=at)
        for tracker in trackers:
            tracker.probability("m1", "Will it?", minute / 100, at=at)
    next(turn).resolve("m1", "NO", at=START.replace(minute=40))
    next(turn).resolve("m1", "YES", at=START.replace(minute=59))


async def test_several_trackers_at_once_come_to_what_one_would_have(store: Store) -> None:
    one = MarketOutcomesTracker(store, clock=lambda: NEXT_HOUR)
    _observe([one])
    assert await one.write(WINDOW_ID) == 3
    alone = await _outcomes(store)
    assert [float(price) for price in alone[1][2:4]] == [108.0, 164.0]
    assert alone[2][-2:] == ("YES", Decimal("0.5800"))

    await store.pool.execute("TRUNCATE market_outcomes, babylon.observations")
    several = [MarketOutcomesTracker(store, clock=lambda: NEXT_HOUR) for _ in range(3)]
    _observe(several)
    await asyncio.gather(*(tracker.write(WINDOW_ID) for tracker in [*several, *several]))
    assert await _outcomes(store) == alone


async def test_a_tracker_that_died_is_taken_up_by_the_next_one(store: Store) -> None:
    first = MarketOutcomesTracker(store, clock=lambda: NEXT_HOUR)
    first.price("TeslAI", 100.0, at=START)
    first.probability("m1", "Will it?", 0.25, at=START)
    await first.save()
    first.price("TeslAI", 1.0, at=START)  # never saved
    second = MarketOutcomesTracker(store, clock=lambda: NEXT_HOUR)
    second.price("TeslAI", 110.0, at=START.replace(minute=50))
    assert await second.write(WINDOW_ID) == 2
    (price, question) = await _outcomes(store)
    assert price[2:6] == (Decimal("100.00"), Decimal("110.00"), Decimal("10.00"), "BULLISH")
    assert question[-2:] == (None, Decimal("0.2500"))


async def test_a_write_that_breaks_in_the_middle_is_repeated_whole(
    store: Store,
) -> None:
    await store.pool.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN IF new.question IS NOT NULL THEN RAISE 'cut off'; END IF; RETURN new; END$$;"
        " CREATE TRIGGER refuse BEFORE INSERT ON market_outcomes"
        " FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    tracker = _tracker(store)
    with pytest.raises(asyncpg.RaiseError, match="cut off"):
        await tracker.write(WINDOW_ID)
    assert await _outcomes(store) == []
    assert await store.pool.fetchval("SELECT count(*) FROM babylon.observations") == 0
    await store.pool.execute("DROP TRIGGER refuse ON market_outcomes")
    assert await tracker.write(WINDOW_ID) == 3
    written = await _outcomes(store)
    assert await tracker.write(WINDOW_ID) == 3
    assert await _outcomes(store) == written


async def test_a_question_is_open_until_the_window_that_resolves_it(
    store: Store,
) -> None:
    tracker = MarketOutcomesTracker(store, clock=lambda: NEXT_HOUR + timedelta(hours=3))
    for hour in range(3):
        tracker.probability("m1", "Will it?", 0.2 + hour / 10, at=START + timedelta(hours=hour))
    tracker.resolve("m1", "YES", at=START + timedelta(hours=1, minutes=5))
    counts = [await tracker.write(f"2025-11-14T{hour:02}:00") for hour in (9, 10, 11)]
    assert counts == [1, 1, 0]
    assert [row[-2:] for row in await _outcomes(store)] == [
        (None, Decimal("0.2000")),
        ("YES", Decimal("0.3000")),
    ]


async def test_a_resolution_learnt_late_takes_the_open_question_away(store: Store) -> None:
    later = START + timedelta(hours=1)
    tracker = MarketOutcomesTracker(store, clock=lambda: later + timedelta(hours=1))
    tracker.probability("m1", "Will it?", 0.7, at=later)
    assert await tracker.write("2025-11-14T10:00") == 1
    tracker.resolve("m1", "NO", at=START)
    assert await tracker.write("2025-11-14T10:00") == 0
    assert await _outcomes(store) == []
    assert await tracker.write(WINDOW_ID) == 1


async def test_an_agent_with_the_name_of_another_user_is_recorded(store: Store) -> None:
    await store.pool.execute(
        """INSERT INTO "User" (id, username) VALUES ('278901234567890001', 'ann')"""
    )
    recorder = TrajectoryRecorder(store, clock=lambda: START)
    trajectory_id = recorder.start("ann")
    _step(recorder, trajectory_id, 1)
    await recorder.finish(trajectory_id)
    assert await store.pool.fetchval('SELECT "agentId" FROM trajectories') == "ann"
