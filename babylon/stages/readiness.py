"""The state of every window, and what it lacks to be trained (``windows list``, ``check``).

The untrained rows of an untrained window are streamed through the checks of ``validate``. For a
trained window the counts of its run are reported. Nothing is written, except that late rows are
recorded.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from babylon.core.errors import WindowError
from babylon.core.game_rows import COLUMNS, UNTRAINED, GameRow
from babylon.core.settings import Settings, WindowSettings
from babylon.core.windows import (
    DONE,
    FINISHED,
    MAX_ATTEMPTS,
    Clock,
    Window,
    WindowState,
    parse_window_id,
    settling,
    window_at,
)
from babylon.quality.reasons import Reason
from babylon.quality.row_checks import check_row
from babylon.store import Store, require_game_tables
from babylon.store.database_clock import read_clock
from babylon.store.late import note_late
from babylon.store.rejections import RejectedFor, Rejection, RejectionTally
from babylon.store.window_counts import WindowCounts, count_windows
from babylon.store.windows import WindowRow, list_windows

_ROWS_AT_A_TIME = 200
_INSTANT = timedelta(microseconds=1)

_ROWS = f"""
    SELECT {COLUMNS} FROM trajectories t
    WHERE ($1::timestamptz IS NULL OR t."startTime" >= $1 AT TIME ZONE 'UTC')
      AND ($2::timestamptz IS NULL OR t."startTime" < $2 AT TIME ZONE 'UTC')
      AND (t."windowId" IS NULL OR t."windowId" <> ALL($3::text[]))
      AND {UNTRAINED}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport:
    """One window, and what is ``missing`` before it can be trained.

    ``eligible`` of the ``trajectories``, by ``agents`` different agents, passed every check. The
    others are in ``rejections`` by reason, with samples. For a finished window these are the
    counts of its run, without samples; ``trained`` trajectories moved the policy, and ``late``
    ones arrived after the run. ``owner`` holds the lease now. ``reason`` is that of the last run.
    After a failure the window is ``resting`` until ``retry_at``. ``age_s`` counts from its end.
    """

    window_id: str
    minutes: int
    state: WindowState
    age_s: float | None
    owner: str | None
    lease_until: datetime | None
    trajectories: int
    agents: int
    eligible: int
    rejections: tuple[RejectedFor, ...]
    trained: int
    late: int
    attempts: int
    retry_at: datetime | None
    resting: bool
    missing: tuple[str, ...]
    reason: str | None

    @property
    def ready(self) -> bool:
        return not self.missing

    @property
    def leased(self) -> bool:
        return self.owner is not None

    @property
    def rejected(self) -> dict[str, int]:
        """Number of rejected trajectories by reason, the most frequent first."""
        return {rejection.reason: rejection.count for rejection in self.rejections}


@dataclass(slots=True)
class _Subject:
    """The data of one report. ``problem``: the reason why the id names no window."""

    window_id: str
    row: WindowRow | None
    window: Window | None = None
    problem: str = ""
    agents: set[str] = field(default_factory=set)
    eligible: int = 0
    rejected: RejectionTally = field(default_factory=RejectionTally)

    @property
    def finished(self) -> bool:
        return self.row is not None and self.row.state in FINISHED

    @property
    def of_recipe(self) -> bool:
        return self.window is not None and bool(self.window.recipe)

    def add(self, row: GameRow, settings: Settings) -> None:
        if self.window is None:
            self.rejected.add(
                Rejection(
                    trajectory_id=row.trajectory_id,
                    reason=Reason.OTHER_WINDOW,
                    detail=self.problem,
                )
            )
            return
        verdict = check_row(row, self.window, settings.quality)
        if isinstance(verdict, Rejection):
            self.rejected.add(verdict)
        else:
            self.agents.add(row.agent_id)
            self.eligible += 1

    def report(self, counts: WindowCounts, windows: WindowSettings, clock: Clock) -> WindowReport:
        row, window = self.row, self.window
        state, unsettled = WindowState.OPEN, self.problem
        if window is not None:
            state, unsettled = settling(window, clock, windows.grace_s)
        if row is not None and row.state != WindowState.READY:
            state = row.state
        agents, eligible, rejections = len(self.agents), self.eligible, self.rejected.reasons()
        if row is not None and (self.finished or self.of_recipe):
            agents, eligible = (int(row.metrics.get(name, 0)) for name in ("agents", "eligible"))
            rejections = [
                RejectedFor(reason=reason, count=count, samples=())
                for reason, count in counts.rejected.most_common()
            ]
        trajectories = eligible + sum(rejection.count for rejection in rejections)
        missing = [unsettled] if unsettled and not self.finished else []
        missing += self._taken(state, clock)
        if not self.finished:
            missing += self._lacking(agents, windows.min_agents)
        return WindowReport(
            window_id=self.window_id,
            minutes=window.minutes if window else 0,
            state=state,
            age_s=(clock.now - window.end).total_seconds() if window else None,
            owner=row.owner if row and row.leased else None,
            lease_until=row.lease_until if row and row.leased else None,
            trajectories=max(counts.collected, trajectories) if self.finished else trajectories,
            agents=agents,
            eligible=eligible,
            rejections=tuple(rejections),
            trained=counts.trained,
            late=counts.late,
            attempts=row.attempts if row else 0,
            retry_at=row.retry_at if row else None,
            resting=bool(self._rest(clock)),
            missing=tuple(missing),
            reason=row.reason if row else None,
        )

    def _taken(self, state: WindowState, clock: Clock) -> Iterator[str]:
        """Yield the reasons in the window's state: in work, done, resting or half-finished."""
        if self.row is not None and self.row.leased:
            yield f"{self.row.owner} is training it now"
        if state in DONE:
            yield f"already trained: the window is {state}"
        elif rest := self._rest(clock):
            yield rest
        elif state == WindowState.TRAINED:
            yield f"trained but not validated: train --window {self.window_id} goes on there"
        elif self.of_recipe:
            yield f"belongs to a recipe: train --window {self.window_id} goes on with it"

    def _rest(self, clock: Clock) -> str:
        """Return how long a failed window is not tried again; empty if it is not resting."""
        row = self.row
        if row is None or row.leased:
            return ""
        tried = f"tried {row.attempts} time{'s' * (row.attempts > 1)} without success"
        if row.attempts >= MAX_ATTEMPTS and row.state not in FINISHED:
            return f"{tried}, no more automatic tries: train --window {self.window_id} tries again"
        if row.retry_at is not None and clock.now < row.retry_at:
            return (
                f"{tried}, again at {row.retry_at:%Y-%m-%dT%H:%M:%S} UTC (train --window at once)"
            )
        return ""

    def _lacking(self, agents: int, min_agents: int) -> Iterator[str]:
        """Yield the play that the window lacks."""
        row = self.row
        if agents < min_agents:
            yield f"{agents} eligible agents, minimum is {min_agents}"
        elif row is None or row.state != WindowState.SKIPPED:
            return
        elif self.eligible == row.metrics.get("eligible"):
            yield f"{row.reason}; nothing was played since (train --window tries it again)"


async def window_reports(
    store: Store,
    settings: Settings,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    clock: Clock | None = None,
) -> list[WindowReport]:
    """Return a report of every window with rows or a state, oldest first.

    A range ``[since, until)`` of starts limits them, but half-finished windows are always included.
    """
    require_game_tables(store)
    clock = clock or await read_clock(store)
    minutes = settings.windows.minutes
    first = window_at(since, minutes) if since else None
    start = first.start if first else None
    end = window_at(until - _INSTANT, minutes).end if until else None
    await note_late(store, minutes, start, end)
    subjects = {
        row.window_id: _subject(row.window_id, row, minutes) for row in await list_windows(store)
    }
    finished = [subject.window_id for subject in subjects.values() if subject.finished]
    async for row in _untrained(store, start, end, finished):
        window_id = _window_of(row, minutes)
        if window_id not in subjects:
            subjects[window_id] = _subject(window_id, None, minutes)
        if not subjects[window_id].finished:
            subjects[window_id].add(row, settings)
    counts = await count_windows(store, first.id if first else "")
    return [
        subjects[window_id].report(counts.get(window_id, WindowCounts()), settings.windows, clock)
        for window_id in sorted(subjects)
        if (
            (first is None or window_id >= first.id)
            and (until is None or window_id < f"{until:%Y-%m-%dT%H:%M}")
        )
        or _is_half_finished(subjects[window_id])
    ]


def _is_half_finished(subject: _Subject) -> bool:
    return subject.row is not None and subject.row.state == WindowState.TRAINED


def _window_of(row: GameRow, minutes: int) -> str:
    """Return the row's window as ``collect`` does: an empty id is an id, but of no window."""
    if row.window_id is not None:
        return row.window_id
    return window_at(row.start, minutes).id if row.start else "no date"


def _subject(window_id: str, row: WindowRow | None, minutes: int) -> _Subject:
    subject = _Subject(window_id, row)
    try:
        if row is None and "+" in window_id:  # the game's ids have no recipe
            raise WindowError(f"window id {window_id!r} is not YYYY-MM-DDTHH:MM (UTC)")
        subject.window = parse_window_id(window_id, row.minutes if row else minutes)
    except WindowError as error:
        subject.problem = str(error)
    return subject


async def _untrained(
    store: Store, since: datetime | None, until: datetime | None, finished: list[str]
) -> AsyncIterator[GameRow]:
    async with store.pool.acquire() as connection, connection.transaction(readonly=True):
        arguments = (since, until, finished)
        async for record in connection.cursor(_ROWS, *arguments, prefetch=_ROWS_AT_A_TIME):
            yield GameRow(**record)
