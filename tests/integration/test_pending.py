"""Which windows a schedule takes up, on a real Postgres."""

from datetime import UTC, datetime, timedelta

from babylon.pending import pending_windows, window_to_train
from babylon.store.windows import claim_window, set_state
from babylon.windows import WindowState, parse_window_id
from tests.integration.game import insert_real_window

NOW = datetime(2025, 11, 14, 12, 5, tzinfo=UTC)
EIGHT, NINE, TEN = (f"2025-11-14T{hour}:00" for hour in ("08", "09", "10"))


async def play_three_hours(store):
    """The real window, and the same play an hour earlier and an hour later."""
    await insert_real_window(store)
    for sign, window in (("-", EIGHT), ("+", TEN)):
        await store.pool.execute(
            "INSERT INTO trajectories SELECT (jsonb_populate_record(t, jsonb_build_object("
            "'id', t.id || $1, 'trajectoryId', t.\"trajectoryId\" || $1, 'windowId', $2::text,"
            f"'startTime', t.\"startTime\" {sign} interval '1 hour',"
            f"'endTime', t.\"endTime\" {sign} interval '1 hour'))).* FROM trajectories t"
            f" WHERE \"windowId\" = '{NINE}'",
            sign,
            window,
        )


async def half_finish(store, window_id, minutes=60):
    window = parse_window_id(window_id, minutes)
    claim = await claim_window(store, window, owner="dead", lease_s=60)
    await set_state(store, claim, WindowState.TRAINED)


async def end_leases(store):
    await store.pool.execute("UPDATE babylon.windows SET lease_until = now()")


async def pending(store, settings):
    return [window.id for window in await pending_windows(store, settings, NOW)]


async def test_oldest_first_for_the_schedule_and_the_newest_when_nobody_names_one(store, settings):
    await play_three_hours(store)
    assert await pending(store, settings) == [EIGHT, NINE, TEN]
    assert (await window_to_train(store, settings, NOW)).id == TEN


async def test_half_finished_windows_go_first_but_not_while_somebody_holds_them(store, settings):
    await play_three_hours(store)
    await half_finish(store, NINE)
    await half_finish(store, EIGHT)
    assert await pending(store, settings) == [TEN]
    assert (await window_to_train(store, settings, NOW)).id == TEN
    await end_leases(store)
    assert await pending(store, settings) == [EIGHT, NINE, TEN]
    assert (await window_to_train(store, settings, NOW)).id == EIGHT


async def test_a_half_finished_window_of_another_length_is_left_alone(store, settings):
    await half_finish(store, NINE, minutes=30)
    await end_leases(store)
    assert await pending(store, settings) == []


async def test_with_nothing_to_do_the_last_window_to_close_says_why(store, settings):
    assert (await window_to_train(store, settings, NOW)).id == "2025-11-14T11:00"


async def test_a_window_waits_until_its_last_rows_had_time_to_arrive(store, settings):
    await insert_real_window(store)
    closed = datetime(2025, 11, 14, 10, tzinfo=UTC)
    early = closed + timedelta(seconds=settings.grace_s - 1)
    assert await pending_windows(store, settings, early) == []
    assert (await window_to_train(store, settings, early)).id == EIGHT
    settled = closed + timedelta(seconds=settings.grace_s)
    assert [w.id for w in await pending_windows(store, settings, settled)] == [NINE]


async def test_a_half_finished_window_is_finished_however_old_it_is(store, settings):
    await half_finish(store, "2025-01-01T00:00")
    await end_leases(store)
    assert await pending(store, settings) == ["2025-01-01T00:00"]
