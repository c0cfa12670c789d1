"""Windows: half-open UTC intervals of play, and the states one goes through.

A window id is its start, ``YYYY-MM-DDTHH:MM`` in UTC. It is parsed as UTC whatever the local
time zone. Windows of M minutes start at multiples of M since midnight UTC.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from babylon.errors import ConfigError, WindowError, WindowNotReadyError

_ID_FORMAT = "%Y-%m-%dT%H:%M"
_ID_PATTERN = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}")
MIN_MINUTES, MAX_MINUTES = 15, 24 * 60
FIRST_YEAR, LAST_YEAR = 1970, 9998  # so that a window's neighbours are dates, too


class WindowState(StrEnum):
    """Where a window is. ``TRANSITIONS`` says what may follow."""

    OPEN = "open"  # nobody has taken it
    CLAIMED = "claimed"  # a worker holds the lease: collect to train
    TRAINED = "trained"  # a checkpoint is committed; verdict and deployment are due
    DEPLOYED = "deployed"
    REJECTED = "rejected"  # trained, but the challenger did not pass
    SKIPPED = "skipped"  # looked at, nothing to train (too few agents, no differing scores)
    FAILED = "failed"  # a stage raised; the reason is stored and a later run may try again


TRANSITIONS: dict[WindowState, frozenset[WindowState]] = {
    WindowState.OPEN: frozenset({WindowState.CLAIMED}),
    WindowState.CLAIMED: frozenset(
        {WindowState.CLAIMED, WindowState.TRAINED, WindowState.SKIPPED, WindowState.FAILED}
    ),
    WindowState.TRAINED: frozenset(
        {WindowState.TRAINED, WindowState.DEPLOYED, WindowState.REJECTED}
    ),
    WindowState.DEPLOYED: frozenset(),
    WindowState.REJECTED: frozenset(),
    WindowState.SKIPPED: frozenset({WindowState.CLAIMED}),
    WindowState.FAILED: frozenset({WindowState.CLAIMED}),
}
DONE = frozenset({WindowState.DEPLOYED, WindowState.REJECTED})


@dataclass(frozen=True, slots=True)
class Window:
    """A half-open interval ``[start, end)`` in UTC."""

    start: datetime
    minutes: int = 60

    def __post_init__(self) -> None:
        check_minutes(self.minutes)
        if self.start.tzinfo != UTC:
            raise WindowError(f"window start {self.start!r} is not in UTC: pass tzinfo=UTC")

    @property
    def id(self) -> str:
        return self.start.strftime(_ID_FORMAT)

    @property
    def end(self) -> datetime:
        return self.start + timedelta(minutes=self.minutes)

    def is_complete(self, now: datetime) -> bool:
        return self.end <= now

    def settled_at(self, grace_s: float) -> datetime:
        """From when on no more rows of the window are expected."""
        return self.end + timedelta(seconds=grace_s)

    def contains(self, moment: datetime) -> bool:
        return self.start <= moment < self.end

    def next(self) -> "Window":
        return Window(self.end, self.minutes)

    def previous(self) -> "Window":
        return Window(self.start - timedelta(minutes=self.minutes), self.minutes)


def check_minutes(minutes: int) -> None:
    """Windows last 15 minutes to 24 hours and tile the day, so that each id has one interval."""
    if not MIN_MINUTES <= minutes <= MAX_MINUTES or MAX_MINUTES % minutes:
        raise ConfigError(
            f"window of {minutes} minutes: choose {MIN_MINUTES} to {MAX_MINUTES} minutes"
            " that divide a day (15, 30, 60, 120, 1440, ...)"
        )


def parse_window_id(text: str, minutes: int = 60) -> Window:
    """``2025-11-14T09:00`` → the window that starts then.

    Raises:
        WindowError: the text is not a window id, or no window of that length starts there.
    """
    if not _ID_PATTERN.fullmatch(text):
        raise WindowError(
            f"window id {text!r} is not YYYY-MM-DDTHH:MM (UTC), for example 2025-11-14T09:00"
        )
    try:
        start = datetime.strptime(text, _ID_FORMAT).replace(tzinfo=UTC)
    except ValueError as error:
        raise WindowError(f"window id {text!r} is not a date and time: {error}") from error
    if not FIRST_YEAR <= start.year <= LAST_YEAR:
        raise WindowError(f"window id {text!r} is not between {FIRST_YEAR} and {LAST_YEAR}")
    window = window_at(start, minutes)
    if window.start != start:
        raise WindowError(
            f"no {minutes}-minute window starts at {text}: the one around it is {window.id}"
        )
    return window


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


def settled_window(text: str, now: datetime, minutes: int, grace_s: float) -> Window:
    """The window of that id, which must be over, its last rows written.

    Raises:
        WindowNotReadyError: rows of the window may still arrive; says until when.
    """
    window = parse_window_id(text, minutes)
    if not window.is_complete(now):
        raise WindowNotReadyError(
            f"window {window.id} is unfinished: it ends at {window.end:%Y-%m-%dT%H:%M} UTC,"
            f" now is {now:%Y-%m-%dT%H:%M:%S}; train it after that"
        )
    if now < (settled := window.settled_at(grace_s)):
        raise WindowNotReadyError(
            f"window {window.id} has just closed: rows may arrive until"
            f" {settled:%Y-%m-%dT%H:%M:%S} UTC (WINDOW_GRACE_SECONDS), now is"
            f" {now:%Y-%m-%dT%H:%M:%S}; train it after that"
        )
    return window
