"""Windows: half-open UTC intervals of play, and their states.

A window id is the window's start, ``YYYY-MM-DDTHH:MM`` in UTC, whatever the local time zone.
Windows of M minutes start at multiples of M since midnight UTC.

The clock alone decides ``open → closing → ready`` (``settling``); these states are not stored. A
claim stores the window's state in Postgres. Every later change is checked against ``TRANSITIONS``
under the claim's epoch.
"""

import asyncio
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache

from babylon.core.errors import ConfigError, WindowError, WindowNotReadyError

ID_FORMAT = "%Y-%m-%dT%H:%M"
_ID_PATTERN = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}")
RECIPE_PATTERN = r"[a-z0-9][a-z0-9-]{0,31}"
JUDGED_AGAIN = "judged-again"  # in the place of a recipe: new scores, of which nothing is trained
MIN_MINUTES, MAX_MINUTES = 15, 24 * 60
LENGTHS = tuple(m for m in range(MIN_MINUTES, MAX_MINUTES + 1) if MAX_MINUTES % m == 0)
_MINUTES_OF_STARTS = sorted({m for length in LENGTHS for m in range(0, MAX_MINUTES, length)})
GAME_MINUTES = 60  # the game names its windows by the hour, however long ours are
FIRST_YEAR, LAST_YEAR = 1970, 9998  # so that the windows before and after are valid dates too
_NAP_S = 60  # so that a changed clock or a suspended machine is noticed
MAX_ATTEMPTS = 10  # over 80 hours, so that an outage of a weekend loses no window
FIRST_BACKOFF, MAX_BACKOFF = timedelta(minutes=15), timedelta(hours=24)


class WindowState(StrEnum):
    """State of a window. ``TRANSITIONS`` lists the allowed changes."""

    OPEN = "open"  # being played
    CLOSING = "closing"  # over, but its rows may still be committed
    READY = "ready"  # settled and not claimed
    CLAIMED = "claimed"  # a worker holds the lease or died with it, as in the next three states
    COLLECTED = "collected"  # rows that arrive from now on are late
    VALIDATED = "validated"
    SCORED = "scored"  # judged; a later run may continue from here
    TRAINED = "trained"  # a checkpoint is committed; validation and deployment follow
    DEPLOYED = "deployed"
    REJECTED = "rejected"  # trained, but the challenger did not pass validation
    SKIPPED = "skipped"  # nothing to train: too few agents, or equal scores
    FAILED = "failed"  # a stage raised an error; the reason is stored, a later run may retry


_STAGES = (
    WindowState.CLAIMED,
    WindowState.COLLECTED,
    WindowState.VALIDATED,
    WindowState.SCORED,
    WindowState.TRAINED,
)
IN_WORK = frozenset(_STAGES[:-1])
FINISHED = frozenset({WindowState.TRAINED, WindowState.DEPLOYED, WindowState.REJECTED})
DONE = FINISHED - {WindowState.TRAINED}
_GIVEN_UP = frozenset({WindowState.SKIPPED, WindowState.FAILED})
AT_REST = DONE | _GIVEN_UP

# Within a claim the state only moves forward, and may skip stages. A stage may commit twice, as the
# answer to its first commit may be lost. A new claim starts again from ``claimed``, except for a
# trained window.
TRANSITIONS: dict[WindowState, frozenset[WindowState]] = {
    WindowState.OPEN: frozenset({WindowState.CLOSING}),
    WindowState.CLOSING: frozenset({WindowState.READY}),
    WindowState.READY: frozenset({WindowState.CLAIMED}),
    **{
        state: frozenset({WindowState.CLAIMED, *_STAGES[number:], *_GIVEN_UP})
        for number, state in enumerate(_STAGES[:-1])
    },
    WindowState.TRAINED: frozenset({WindowState.TRAINED, *DONE}),
    WindowState.DEPLOYED: frozenset(),
    WindowState.REJECTED: frozenset(),
    WindowState.SKIPPED: frozenset({WindowState.CLAIMED}),
    WindowState.FAILED: frozenset({WindowState.CLAIMED}),
}


@dataclass(frozen=True, slots=True)
class Window:
    """A half-open interval ``[start, end)`` in UTC.

    ``recipe`` is not empty when a finished window is trained once more on rows that were not
    trained before. Its claims, scores and batch then have ``key`` as their window id, beside those
    of the first training.
    """

    start: datetime
    minutes: int = 60
    recipe: str = ""

    def __post_init__(self) -> None:
        check_minutes(self.minutes)
        if self.start.tzinfo != UTC:
            raise WindowError(f"window start {self.start!r} is not in UTC: pass tzinfo=UTC")
        if self.recipe and not re.fullmatch(RECIPE_PATTERN, self.recipe):
            raise WindowError(
                f"recipe {self.recipe!r}: use up to 32 lower-case letters, digits and dashes"
            )

    @property
    def id(self) -> str:
        """The window id: ``2025-11-14T09:00``."""
        return self.start.strftime(ID_FORMAT)

    @property
    def key(self) -> str:
        """The id with the recipe: ``2025-11-14T09:00`` or ``2025-11-14T09:00+recipe``."""
        return f"{self.id}+{self.recipe}" if self.recipe else self.id

    @property
    def end(self) -> datetime:
        return self.start + timedelta(minutes=self.minutes)

    def is_complete(self, now: datetime) -> bool:
        return self.end <= now

    def contains(self, moment: datetime) -> bool:
        return self.start <= moment < self.end

    def next(self) -> "Window":
        return Window(self.end, self.minutes)

    def previous(self) -> "Window":
        return Window(self.start - timedelta(minutes=self.minutes), self.minutes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The database's time; a worker's own clock may be wrong by hours.

    ``oldest_writer``: start of the oldest open transaction that has written something.
    ``hidden``: number of other accounts' sessions whose transactions we may not see.
    """

    now: datetime
    oldest_writer: datetime | None = None
    hidden: int = 0


def check_minutes(minutes: int) -> None:
    """Check that windows of this length tile the day, so that each id names one interval.

    Raises:
        ConfigError: the length is not 15 minutes to 24 hours, or does not divide a day.
    """
    if minutes not in LENGTHS:
        raise ConfigError(
            f"window of {minutes} minutes: choose {MIN_MINUTES} to {MAX_MINUTES} minutes"
            " that divide a day (15, 30, 60, 120, 1440, ...)"
        )


def start_of(window_id: str) -> datetime:
    """Return the start that an id names, with or without ``+recipe``, of a window of any length.

    Raises:
        WindowError: the text is not a window id.
    """
    name, plus, recipe = window_id.partition("+")
    if not _ID_PATTERN.fullmatch(name) or (plus and not recipe):
        raise WindowError(
            f"window id {window_id!r} is not YYYY-MM-DDTHH:MM (UTC), for example 2025-11-14T09:00"
        )
    return _parse_start(name)


def parse_window_id(text: str, minutes: int = 60) -> Window:
    """Parse ``2025-11-14T09:00`` or ``2025-11-14T09:00+recipe``.

    Raises:
        WindowError: the text is not a window id, or no window of that length starts there.
    """
    start = start_of(text)
    window = window_at(start, minutes)
    if window.start != start:
        raise WindowError(
            f"no {minutes}-minute window starts at {text}: the one around it is {window.id}"
        )
    return Window(start, minutes, text.partition("+")[2])


@lru_cache(maxsize=256)  # the rows of a window share few ids
def id_problem(window: Window, window_id: str, hours: int) -> str:
    """Return why a row that started in ``window`` cannot carry ``window_id``; empty if it can.

    The start of a row decides its window, because ours may have another length than its writer's.
    The id is the check: the interval that it names must overlap the window. An id does not tell its
    length, so this is the longest of at most ``hours`` hours that starts there.
    """
    if not _ID_PATTERN.fullmatch(window_id):
        return f"window id {window_id!r} is not YYYY-MM-DDTHH:MM (UTC)"
    try:
        start = _parse_start(window_id)
    except WindowError as error:
        return str(error)
    longest = min(max(hours, 1) * 60, MAX_MINUTES)
    fitting = [m for m in LENGTHS if m <= longest and window_at(start, m).start == start]
    if not fitting:
        return f"no window starts at {window_id}"
    if start < window.end and window.start < start + timedelta(minutes=max(fitting)):
        return ""
    return f"its window id {window_id} ({max(fitting)} minutes) lies outside window {window.id}"


def outcome_ids(window: Window) -> list[str]:
    """Return every window id that ground truth of the window may carry, the earliest first.

    These are all ids that start inside it, and the game's hour around its start.
    """
    hour = window_at(window.start, GAME_MINUTES).start
    midnight = window_at(window.start, MAX_MINUTES).start
    starts = (midnight + timedelta(minutes=m) for m in _MINUTES_OF_STARTS)
    inside = (start for start in starts if window.contains(start))
    return [f"{start:{ID_FORMAT}}" for start in dict.fromkeys([hour, *inside])]


def _parse_start(text: str) -> datetime:
    try:
        start = datetime.strptime(text, ID_FORMAT).replace(tzinfo=UTC)
    except ValueError as error:
        raise WindowError(f"window id {text!r} is not a date and time of the calendar") from error
    if not FIRST_YEAR <= start.year <= LAST_YEAR:
        raise WindowError(f"window id {text!r} is not between {FIRST_YEAR} and {LAST_YEAR}")
    return start


def parse_bound(text: str, *, last: bool = False) -> datetime:
    """Parse a date or window id as an end of a range of window starts.

    The first bound is inclusive. With ``last`` the returned bound is exclusive: it lies after the
    given date or window start.

    Raises:
        WindowError: the text is neither a date nor a window id.
    """
    is_date = re.fullmatch(r"\d{4}-\d{2}-\d{2}", text) is not None
    if not is_date and not _ID_PATTERN.fullmatch(text):
        raise WindowError(f"{text!r} is neither YYYY-MM-DD nor YYYY-MM-DDTHH:MM (UTC)")
    start = _parse_start(f"{text}T00:00" if is_date else text)
    if not last:
        return start
    return start + (timedelta(days=1) if is_date else timedelta(minutes=1))


def window_at(moment: datetime, minutes: int = 60) -> Window:
    """Return the window that contains a moment."""
    check_minutes(minutes)
    moment = moment.astimezone(UTC)
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    elapsed = int((moment - midnight).total_seconds() // 60)
    return Window(midnight + timedelta(minutes=elapsed - elapsed % minutes), minutes)


def last_complete_window(now: datetime, minutes: int = 60) -> Window:
    """Return the newest window that is over."""
    return window_at(now, minutes).previous()


def settling(window: Window, clock: Clock, grace_s: float) -> tuple[WindowState, str]:
    """Return ``open``, ``closing`` or ``ready``, and the reason why the window is not ready.

    A window becomes ready after a grace period, for rows that are written a little late, and after
    every transaction that was open then has ended. The wait for transactions lasts one window's
    length at most, so that a forgotten session does not stop training. Rows that are committed
    after it are late.
    """
    settled = window.end + timedelta(seconds=grace_s)
    patience = settled + timedelta(minutes=window.minutes)
    writer = clock.oldest_writer
    if clock.now < window.end:
        return WindowState.OPEN, f"the window is not over: it ends at {_clock(window.end)} UTC"
    if clock.now < settled:
        return (
            WindowState.CLOSING,
            f"rows may still arrive, until {_clock(settled)} UTC (WINDOW_GRACE_SECONDS)",
        )
    if writer is not None and writer < settled and clock.now < patience:
        return (
            WindowState.CLOSING,
            f"a transaction that wrote rows is open since {_clock(writer)} UTC: training waits"
            f" for it until {_clock(patience)}",
        )
    return WindowState.READY, ""


def check_settled(window: Window, clock: Clock, grace_s: float) -> None:
    """Check that a window is ready.

    Raises:
        WindowNotReadyError: rows of the window may still arrive; the message says until when.
    """
    state, why = settling(window, clock, grace_s)
    if state is not WindowState.READY:
        raise WindowNotReadyError(
            f"window {window.id} is {state}: {why}; it is {_clock(clock.now)} now: train it later"
        )


def backoff(attempts: int) -> timedelta:
    """Return the wait before the next attempt, after ``attempts`` failures in a row."""
    return min(FIRST_BACKOFF * (1 << min(attempts - 1, 20)), MAX_BACKOFF)


async def sleep_until(moment: datetime) -> None:
    """Sleep until a moment of this machine's clock."""
    while (seconds := (moment - datetime.now(UTC)).total_seconds()) > 0:
        await asyncio.sleep(min(seconds, _NAP_S))


def _clock(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%S}"
