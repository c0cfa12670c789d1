"""Windows that a schedule takes up, on a real Postgres."""

from datetime import UTC, datetime, timedelta

import pytest

from babylon.core.errors import WindowError
from babylon.core.windows import Clock, Window, WindowState, backoff, parse_window_id
from babylon.stages.pending import pending_windows, window_to_train
from babylon.store.late import store_collected
from babylon.store.windows import claim_window, get_window, list_windows, release, set_state
from tests.integration.game import insert_real_window

NOW = datetime(2025, 11, 14, 12, 5, tzinfo=UTC)
CLOCK = Clock(now=NOW)
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
    found = await pending_windows(store, settings.windows, settings.quality, clock=CLOCK)
    return [window.id for window in found]


async def test_the_schedule_takes_the_oldest_and_a_default_the_newest(store, settings):
    await play_three_hours(store)
    assert await pending(store, settings) == [EIGHT, NINE, TEN]
    assert (await window_to_train(store, settings.windows, settings.quality, clock=CLOCK)).id == TEN


async def test_half_finished_windows_go_first_unless_they_are_held(store, settings):
    await play_three_hours(store)
    await half_finish(store, NINE)
    await half_finish(store, EIGHT)
    assert await pending(store, settings) == [TEN]
    assert (await window_to_train(store, settings.windows, settings.quality, clock=CLOCK)).id == TEN
    await end_leases(store)
    assert await pending(store, settings) == [EIGHT, NINE, TEN]
    assert (
        await window_to_train(store, settings.windows, settings.quality, clock=CLOCK)
    ).id == EIGHT


async def test_a_half_finished_window_of_another_length_is_left_alone(store, settings):
    await half_finish(store, NINE, minutes=30)
    await end_leases(store)
    assert await pending(store, settings) == []


async def test_with_nothing_to_do_the_last_window_to_close_says_why(store, settings):
    assert (
        await window_to_train(store, settings.windows, settings.quality, clock=CLOCK)
    ).id == "2025-11-14T11:00"


async def test_a_mistyped_window_is_refused_and_leaves_no_row(store, settings):
    await insert_real_window(store)
    arguments = (store, settings.windows, settings.quality)
    for mistyped in ("2024-11-14T09:00", "2024-11-14T09:00+short"):
        with pytest.raises(WindowError, match=r"2024-11-14T09:00 has no play: nothing .* began"):
            await window_to_train(*arguments, mistyped, clock=CLOCK)
    assert await list_windows(store) == []
    assert (await window_to_train(*arguments, NINE, clock=CLOCK)).id == NINE
    await half_finish(store, EIGHT)  # its play may be removed since
    assert (await window_to_train(*arguments, EIGHT, clock=CLOCK)).id == EIGHT


async def test_a_window_waits_until_its_last_rows_had_time_to_arrive(store, settings):
    await insert_real_window(store)
    closed = datetime(2025, 11, 14, 10, tzinfo=UTC)
    early = Clock(now=closed + timedelta(seconds=settings.windows.grace_s - 1))
    assert await pending_windows(store, settings.windows, settings.quality, clock=early) == []
    assert (
        await window_to_train(store, settings.windows, settings.quality, clock=early)
    ).id == EIGHT
    settled = Clock(now=closed + timedelta(seconds=settings.windows.grace_s))
    assert [
        w.id
        for w in await pending_windows(store, settings.windows, settings.quality, clock=settled)
    ] == [NINE]


async def test_a_half_finished_window_is_finished_however_old_it_is(store, settings):
    await half_finish(store, "2025-01-01T00:00")
    await end_leases(store)
    assert await pending(store, settings) == ["2025-01-01T00:00"]


async def test_dates_and_ids_bound_what_is_looked_at(store, settings):
    await play_three_hours(store)

    async def between(first, last, **options):
        found = await pending_windows(
            store,
            settings.windows,
            settings.quality,
            first=first,
            last=last,
            clock=CLOCK,
            **options,
        )
        return [window.id for window in found]

    assert await between(NINE, None) == [NINE, TEN]
    assert await between(None, NINE) == [EIGHT, NINE]
    assert await between(NINE, NINE) == [NINE]
    assert await between("2025-11-14", "2025-11-14") == [EIGHT, NINE, TEN]
    assert await between("2025-11-15", None) == await between(None, "2025-11-13") == []
    assert await between(None, NINE, hours=3) == [NINE]
    old = CLOCK.now + timedelta(days=365)
    assert (
        await pending_windows(store, settings.windows, settings.quality, clock=Clock(now=old)) == []
    )
    (oldest, *_) = await pending_windows(
        store, settings.windows, settings.quality, first=EIGHT, clock=Clock(now=old)
    )
    assert oldest.id == EIGHT  # whoever names a beginning needs no lookback


async def test_a_failing_window_rests_longer_each_time_then_for_good(store, settings):
    await insert_real_window(store)
    window = parse_window_id(NINE)
    for attempt in range(1, 11):
        claim = await claim_window(store, window, owner=f"run-{attempt}", lease_s=60)
        await set_state(store, claim, WindowState.FAILED, reason="loss is nan")
        row = await get_window(store, NINE)
        assert row.attempts == attempt
        assert timedelta() < row.retry_at - row.updated_at - backoff(attempt) + timedelta(seconds=1)
        before, after = (row.retry_at + timedelta(seconds=s) for s in (-1, 1))
        hours = 24 * 365 * 100
        waits = [
            await pending_windows(
                store, settings.windows, settings.quality, hours=hours, clock=Clock(now=now)
            )
            for now in (before, after)
        ]
        assert waits == [[], [window] if attempt < 10 else []]


async def test_a_run_that_was_stopped_is_no_failure(store, settings):
    await insert_real_window(store)
    for _ in range(12):
        claim = await claim_window(store, parse_window_id(NINE), owner="run", lease_s=60)
        await release(store, claim, "stopped: KeyboardInterrupt", "stopped")
    assert await pending(store, settings) == [NINE]


async def test_a_recipe_takes_a_done_window_once_if_rows_were_untrained(store, settings):
    await insert_real_window(store)
    again = settings.replace(windows={"recipe": "again"})
    assert await pending(store, again) == []  # it is not done
    assert (
        await window_to_train(store, again.windows, again.quality, clock=CLOCK)
    ).key == "2025-11-14T11:00+again"
    claim = await claim_window(store, parse_window_id(NINE), owner="run", lease_s=60)
    ids = [r[0] for r in await store.pool.fetch('SELECT "trajectoryId" FROM trajectories')]
    await store_collected(store, claim, ids)
    await set_state(store, claim, WindowState.TRAINED)
    assert await pending(store, again) == []
    await set_state(store, claim, WindowState.REJECTED)
    (window,) = await pending_windows(store, again.windows, again.quality, clock=CLOCK)
    assert window == Window(parse_window_id(NINE).start, recipe="again")
    assert await pending(store, settings) == []

    claim = await claim_window(store, window, owner="run", lease_s=60)
    assert await pending(store, again) == []  # somebody works on it
    await set_state(store, claim, WindowState.SKIPPED)
    assert await pending(store, again) == []  # and nothing was to be learned
    other = settings.replace(windows={"recipe": "other"})
    assert await pending(store, other) == [NINE]
    await store.pool.execute(
        "INSERT INTO babylon.trained SELECT unnest($1::text[]), $2, 'b'", ids, NINE
    )
    assert await pending(store, other) == []


async def test_late_rows_alone_wait_only_for_a_recipe_that_asks_them(store, settings):
    """A recipe that found nothing is not tried again: it must not be spent on a look in vain."""
    await insert_real_window(store)
    claim = await claim_window(store, parse_window_id(NINE), owner="run", lease_s=60)
    await store_collected(store, claim, [])
    await set_state(store, claim, WindowState.TRAINED)
    await set_state(store, claim, WindowState.REJECTED)
    recipe = settings.replace(windows={"recipe": "again"})
    assert await pending(store, recipe) == []
    assert await pending(store, recipe.replace(windows={"include_late": True})) == [NINE]
