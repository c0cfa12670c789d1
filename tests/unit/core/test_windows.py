"""Window ids and keys, readiness for training, and state transitions."""

from datetime import UTC, datetime, timedelta

import pytest

from babylon.core.errors import WindowError, WindowNotReadyError
from babylon.core.windows import (
    DONE,
    IN_WORK,
    MAX_ATTEMPTS,
    TRANSITIONS,
    Clock,
    Window,
    WindowState,
    backoff,
    check_settled,
    parse_bound,
    parse_window_id,
    settling,
    sleep_until,
)

WINDOW = parse_window_id("2025-11-14T09:00")
CLOSES = datetime(2025, 11, 14, 10, tzinfo=UTC)


def at(seconds: float, *, writer: float | None = None) -> Clock:
    """Return the clock ``seconds`` after the window's end; ``writer``: start of a transaction."""
    since = None if writer is None else CLOSES + timedelta(seconds=writer)
    return Clock(now=CLOSES + timedelta(seconds=seconds), oldest_writer=since)


@pytest.mark.parametrize(
    ("clock", "state", "said"),
    [
        (at(-1), "open", "it ends at 2025-11-14T10:00:00 UTC"),
        (at(0), "closing", "until 2025-11-14T10:01:00"),
        (at(59), "closing", "rows may still arrive"),
        (at(60), "ready", ""),
        (at(61, writer=-600), "closing", "open since 2025-11-14T09:50:00 UTC"),
        (at(61, writer=59), "closing", "waits for it until 2025-11-14T11:01:00"),
        (at(61, writer=60), "ready", ""),  # what begins later is late
        (at(3659, writer=-600), "closing", "a transaction that wrote rows"),
        (at(3660, writer=-600), "ready", ""),  # a forgotten session does not stop the system
    ],
)
def test_the_clock_alone_decides_whether_the_last_rows_are_in(
    clock: Clock, state: str, said: str
) -> None:
    assert settling(WINDOW, clock, grace_s=60)[0] == state
    assert said in settling(WINDOW, clock, grace_s=60)[1]
    if state == "ready":
        check_settled(WINDOW, clock, grace_s=60)
    else:
        with pytest.raises(WindowNotReadyError, match=f"window 2025-11-14T09:00 is {state}: "):
            check_settled(WINDOW, clock, grace_s=60)


def test_every_state_has_its_row_in_the_table_and_all_can_be_reached() -> None:
    assert TRANSITIONS.keys() == set(WindowState)
    reached, edge = set(), {WindowState.OPEN}
    while edge:
        reached |= edge
        edge = set().union(*(TRANSITIONS[state] for state in edge)) - reached
    assert reached == set(WindowState)


def test_a_claim_goes_forward_only_and_what_is_done_is_done() -> None:
    order = list(WindowState)
    for state in IN_WORK:
        following = TRANSITIONS[state]
        assert {WindowState.CLAIMED, WindowState.FAILED, WindowState.SKIPPED} <= following
        back = {s for s in IN_WORK if order.index(s) < order.index(state)}
        assert back & following <= {WindowState.CLAIMED}
        assert not following & (DONE | {WindowState.OPEN, WindowState.READY})
    assert all(not TRANSITIONS[state] for state in DONE)
    assert TRANSITIONS[WindowState.TRAINED] == {WindowState.TRAINED, *DONE}


def test_failures_are_retried_at_growing_intervals_over_a_weekend_and_not_for_ever() -> None:
    waits = [backoff(attempt) for attempt in range(1, MAX_ATTEMPTS)]
    assert waits[:3] == [timedelta(minutes=15), timedelta(minutes=30), timedelta(hours=1)]
    assert waits == sorted(waits) and waits[-1] == timedelta(hours=24) == backoff(10_000)
    assert sum(waits, timedelta()) > timedelta(hours=62)  # Friday evening to Monday morning


@pytest.mark.parametrize("text", ["9999-12-31T23:00", "0001-01-01T00:00"])
def test_a_window_at_the_end_of_the_calendar_is_refused(text: str) -> None:
    with pytest.raises(WindowError, match="is not between 1970 and 9998"):
        parse_window_id(text)


def test_a_key_names_the_recipe_beside_the_games_id() -> None:
    window = Window(WINDOW.start, recipe="ruler-2")
    assert (window.id, window.key) == ("2025-11-14T09:00", "2025-11-14T09:00+ruler-2")
    assert parse_window_id(window.key) == window
    assert WINDOW.key == WINDOW.id


@pytest.mark.parametrize(
    "text", ["2025-11-14T09:00+", "2025-11-14T09:00+A", "2025-11-14T09:00+../x"]
)
def test_a_recipe_that_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(WindowError):
        parse_window_id(text)


def test_bounds_are_dates_or_ids_and_the_last_is_inclusive() -> None:
    day = datetime(2025, 11, 14, tzinfo=UTC)
    assert parse_bound("2025-11-14") == day
    assert parse_bound("2025-11-14", last=True) == day + timedelta(days=1)
    assert parse_bound("2025-11-14T09:00") == WINDOW.start < parse_bound(WINDOW.id, last=True)
    for text in ("14.11.2025", "2025-11-14T09:00+x", "2025-13-01"):
        with pytest.raises(WindowError, match=text.replace("+", r"\+")):
            parse_bound(text)


@pytest.mark.parametrize("minutes", [15, 16, 20, 45, 60])
def test_every_window_is_a_bound_whatever_its_length(minutes: int) -> None:
    second = Window(datetime(2025, 11, 14, tzinfo=UTC), minutes).next()
    assert parse_bound(second.id) == second.start
    assert second.start < parse_bound(second.id, last=True) < second.end


async def test_sleeping_ends_at_the_moment() -> None:
    moment = datetime.now(UTC) + timedelta(seconds=0.2)
    await sleep_until(moment)
    assert datetime.now(UTC) >= moment
    await sleep_until(moment - timedelta(hours=1))  # past: at once
