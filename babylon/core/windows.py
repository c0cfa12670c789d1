"""Windows: half-open UTC intervals of play, and the states one goes through.

A window id is its start, ``YYYY-MM-DDTHH:MM`` in UTC. It is parsed as UTC whatever the local
time zone. Windows of M minutes start at multiples of M since midnight UTC.

``open → closing → ready`` is what the clock alone decides (``settling``); nobody stores it. From
the claim on a window's state is a row in Postgres, and every change is checked against
``TRANSITIONS`` under the claim's epoch.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from babylon.core.errors import ConfigError, WindowError, WindowNotReadyError

ID_FORMAT = "%Y-%m-%dT%H:%M"
_ID_PATTERN = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}")
RECIPE_PATTERN = r"[a-z0-9][a-z0-9-]{0,31}"
MIN_MINUTES, MAX_MINUTES = 15, 24 * 60
FIRST_YEAR, LAST_YEAR = 1970, 9998  # so that a window's neighbours are dates, too
MAX_ATTEMPTS = 10  # over 80 hours: an outage that lasts a weekend must not lose its windows
FIRST_BACKOFF, MAX_BACKOFF = timedelta(minutes=15), timedelta(hours=24)


class WindowState(StrEnum):
    """Where a window is. ``TRANSITIONS`` says what may follow."""

    OPEN = "open"  # being played
    CLOSING = "closing"  # over, but rows of it may still be committed
    READY = "ready"  # settled, and nobody has taken it
    CLAIMED = "claimed"  # a worker holds the lease, or died with it; so with the next three
    COLLECTED = "collected"  # what arrives from now on is late
    VALIDATED = "validated"
    SCORED = "scored"  # judged: a later run may go on from here
    TRAINED = "trained"  # a checkpoint is committed; verdict and deployment are due
    DEPLOYED = "deployed"
    REJECTED = "rejected"  # trained, but the challenger did not pass
    SKIPPED = "skipped"  # looked at, nothing to train (too few agents, no differing scores)
    FAILED = "failed"  # a stage raised; the reason is stored and a later run may try again


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

# Within a claim a window only goes forward, over any number of stages at a time. A stage may commit
# again, because the answer to its first commit may be lost. A new claim starts over, except for a
# window that is trained.
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

    ``recipe`` is empty but where a window that is done is taken up once more for what was never
    trained in it; its claims, scores and batch then go by ``key``, beside those of the first time.
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
        """As the game names it."""
        return self.start.strftime(ID_FORMAT)

    @property
    def key(self) -> str:
        """As we name it: ``2025-11-14T09:00``, or ``2025-11-14T09:00+recipe``."""
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
    """What the database knows about time; a worker's own clock may be wrong by hours.

    ``oldest_writer``: since when the oldest transaction is open that has written something.
    ``hidden``: sessions of other accounts, of whose transactions it tells us nothing.
    """

    now: datetime
    oldest_writer: datetime | None = None
    hidden: int = 0


def check_minutes(minutes: int) -> None:
    """Windows last 15 minutes to 24 hours and tile the day, so that each id has one interval."""
    if not MIN_MINUTES <= minutes <= MAX_MINUTES or MAX_MINUTES % minutes:
        raise ConfigError(
            f"window of {minutes} minutes: choose {MIN_MINUTES} to {MAX_MINUTES} minutes"
            " that divide a day (15, 30, 60, 120, 1440, ...)"
        )


def parse_window_id(text: str, minutes: int = 60) -> Window:
    """``2025-11-14T09:00`` → the window that starts then; a key names its recipe as well.

    Raises:
        WindowError: the text is not a window id, or no window of that length starts there.
    """
    name, plus, recipe = text.partition("+")
    if not _ID_PATTERN.fullmatch(name) or (plus and not recipe):
        raise WindowError(
            f"window id {text!r} is not YYYY-MM-DDTHH:MM (UTC), for example 2025-11-14T09:00"
        )
    start = _parse_start(name)
    window = window_at(start, minutes)
    if window.start != start:
        raise WindowError(
            f"no {minutes}-minute window starts at {text}: the one around it is {window.id}"
        )
    return Window(start, minutes, recipe)


def _parse_start(text: str) -> datetime:
    try:
        start = datetime.strptime(text, ID_FORMAT).replace(tzinfo=UTC)
    except ValueError as error:
        raise WindowError(f"window id {text!r} is not a date and time: {error}") from error
    if not FIRST_YEAR <= start.year <= LAST_YEAR:
        raise WindowError(f"window id {text!r} is not between {FIRST_YEAR} and {LAST_YEAR}")
    return start


def parse_bound(text: str, *, last: bool = False) -> datetime:
    """A date or window id → from when on windows start; of the ``last``, before when they do.

    Raises:
        WindowError: it is neither.
    """
    is_date = re.fullmatch(r"\d{4}-\d{2}-\d{2}", text) is not None
    if not is_date and not _ID_PATTERN.fullmatch(text):
        raise WindowError(f"{text!r} is neither YYYY-MM-DD nor YYYY-MM-DDTHH:MM (UTC)")
    start = _parse_start(f"{text}T00:00" if is_date else text)
    if not last:
        return start
    return start + (timedelta(days=1) if is_date else timedelta(minutes=1))


def window_at(moment: datetime, minutes: int = 60) -> Window:
    """The window that contains a moment."""
    check_minutes(minutes)
    moment = moment.astimezone(UTC)
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    elapsed = int((moment - midnight).total_seconds() // 60)
    return Window(midnight + timedelta(minutes=elapsed - elapsed % minutes), minutes)


def last_complete_window(now: datetime, minutes: int = 60) -> Window:
    """The newest window that is over; the current one is never trained."""
    return window_at(now, minutes).previous()


def settling(window: Window, clock: Clock, grace_s: float) -> tuple[WindowState, str]:
    """``open``, ``closing`` or ``ready``, and what a window that is not ready waits for.

    Two things protect the last rows: a grace, for what is written a little late, and the wait for
    every transaction that was open at its end. Such a wait lasts a window's length at most: what
    is committed after it counts as late, and a forgotten session does not stop the system.
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
            f"a transaction that has written is open since {_clock(writer)} UTC: it is waited for"
            f" until {_clock(patience)}",
        )
    return WindowState.READY, ""


def check_settled(window: Window, clock: Clock, grace_s: float) -> None:
    """
    Raises:
        WindowNotReadyError: rows of the window may still arrive; says until when.
    """
    state, why = settling(window, clock, grace_s)
    if state is not WindowState.READY:
        raise WindowNotReadyError(
            f"window {window.id} is {state}: {why}; now is {_clock(clock.now)}, train it after that"
        )


def backoff(attempts: int) -> timedelta:
    """How long a window that failed so many times in a row is left alone."""
    return min(FIRST_BACKOFF * (1 << min(attempts - 1, 20)), MAX_BACKOFF)


def _clock(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%S}"
