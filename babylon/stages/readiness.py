"""The state of every window, and what it lacks to be trained (``windows list``, ``check``).

The untrained rows of an untrained window go through the checks of ``validate``; the results are
remembered (``checked_rows``). For a trained window the counts of its run are reported. Nothing is
written to the database.
"""

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from babylon.core.game_rows import FOR_TRAINING
from babylon.core.settings import WindowSettings
from babylon.core.types import Rejection
from babylon.core.windows import (
    DONE,
    FINISHED,
    JUDGED_AGAIN,
    MAX_ATTEMPTS,
    Clock,
    Window,
    WindowState,
    parse_window_id,
    settling,
    window_at,
)
from babylon.quality.decode import Reason
from babylon.stages.checked_rows import NARROW, CheckedRows, NarrowRow
from babylon.store import Store, require_game_tables
from babylon.store.connection import read_clock
from babylon.store.late import finished_play, free_for_training, missed_rows
from babylon.store.market_outcomes import awaits_outcomes
from babylon.store.rejections import (
    RejectedFor,
    RejectionTally,
    WindowCounts,
    count_windows,
)
from babylon.store.session import in_batches
from babylon.store.window_health import alarms_since
from babylon.store.windows import WindowRow, list_windows

_ROWS_AT_A_TIME = 1000
_INSTANT = timedelta(microseconds=1)
NO_DATE = "no date"
_UNDATED = "startTime is infinite or outside the years of windows: these rows are in no window"

_ROWS = f"""
    SELECT {NARROW} FROM trajectories t
    WHERE ($1::timestamptz IS NULL OR t."startTime" >= $1 AT TIME ZONE 'UTC')
      AND ($2::timestamptz IS NULL OR t."startTime" < $2 AT TIME ZONE 'UTC')
      AND NOT t."startTime" <@ $3::text::tsmultirange
      AND {FOR_TRAINING}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport:
    """One window, and what is ``missing`` before it can be trained.

    ``eligible`` of the ``trajectories``, by ``agents`` different agents, passed every check. The
    others are in ``rejections`` by reason, with samples. For a finished window these are the
    counts of its run, without samples; ``trained`` trajectories moved the policy, and ``late``
    ones arrived after the run. ``outcomes`` market outcomes were known when it was judged.
    ``alarms`` are reasons why its data looks unlike that of the windows before it.
    ``owner`` holds the lease now. ``reason`` is that of the last run. After a failure the window is
    ``resting`` until ``retry_at``. ``age_s`` counts from its end.
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
    outcomes: int | None
    alarms: tuple[str, ...]
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
    """The data of one report. ``problem``: why there is no ``window``. ``awaited``: why its market
    outcomes are waited for."""

    window_id: str
    row: WindowRow | None
    window: Window | None = None
    problem: str = ""
    awaited: str = ""
    alarms: tuple[str, ...] = ()
    rows: list[NarrowRow] = field(default_factory=list)
    agents: set[str] = field(default_factory=set)
    eligible: int = 0
    rejected: RejectionTally = field(default_factory=RejectionTally)

    @property
    def finished(self) -> bool:
        return self.row is not None and self.row.state in FINISHED

    @property
    def of_recipe(self) -> bool:
        return self.window is not None and bool(self.window.recipe)

    def count(self, row: NarrowRow, rejection: Rejection | None) -> None:
        if rejection is None:
            self.agents.add(row.agent_id)
            self.eligible += 1
        else:
            self.rejected.add(rejection)

    def reject_all(self) -> None:
        """Reject the rows of an id that names no window."""
        for row in self.rows:
            self.rejected.add(
                Rejection(
                    trajectory_id=row.trajectory_id,
                    reason=Reason.OTHER_WINDOW,
                    detail=self.problem,
                )
            )

    def report(self, counts: WindowCounts, windows: WindowSettings, clock: Clock) -> WindowReport:
        row, window = self.row, self.window
        state, unsettled = WindowState.OPEN, self.problem
        if window is not None:
            state, unsettled = settling(window, clock, windows.grace_s)
        if self.awaited and not unsettled:
            state, unsettled = WindowState.CLOSING, self.awaited
        if row is not None and row.state != WindowState.READY:
            state = row.state
        agents, eligible, rejections = len(self.agents), self.eligible, self.rejected.reasons()
        # No row has the id of a recipe's window, and a finished window's rows were not read.
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
            outcomes=row.metrics.get("market_outcomes") if row else None,
            alarms=self.alarms,
            attempts=row.attempts if row else 0,
            retry_at=row.retry_at if row else None,
            resting=bool(self._rest(clock)),
            missing=tuple(missing),
            reason=self._reason(),
        )

    def _reason(self) -> str | None:
        if self.row is not None and self.row.lost:
            return f"{self.row.owner} died with it: it is lost until a run takes it up"
        return self.row.reason if self.row else None

    def _taken(self, state: WindowState, clock: Clock) -> Iterator[str]:
        """Yield the reasons in the window's state: in work, done, resting or half-finished."""
        if self.row is not None and self.row.leased:
            yield f"{self.row.owner} is training it now"
        if state in DONE:
            yield f"already trained: the window is {state}"
        elif self.window is not None and self.window.recipe == JUDGED_AGAIN:
            yield "it was judged again: nothing of it is trained"
        elif rest := self._rest(clock):
            yield rest
        elif state == WindowState.TRAINED:
            yield f"trained but not validated: train --window {self.window_id} goes on there"
        elif self.of_recipe:
            yield f"belongs to a recipe: train --window {self.window_id} goes on with it"

    def _rest(self, clock: Clock) -> str:
        """Return how long a window that failed or was skipped rests; empty if it does not."""
        row = self.row
        if row is None or row.leased:
            return ""
        if row.attempts >= MAX_ATTEMPTS and row.state == WindowState.SKIPPED:
            return f"{row.reason} (`babylon windows retry {self.window_id}` takes that back)"
        tried = f"tried {row.attempts} time{'s' * (row.attempts > 1)} without success"
        if row.attempts >= MAX_ATTEMPTS and row.state not in DONE:
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
            return
        if row is None or row.state != WindowState.SKIPPED:
            return
        # The scorer refuses some of the rows that pass the checks.
        refused = row.metrics.get("judge_rejected", 0)
        if self.eligible == row.metrics.get("eligible", -1) + refused:
            yield f"{row.reason}; nothing was played since (train --window tries it again)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A part of the windows: ``only`` one, or the newest ``limit`` of those before an id."""

    limit: int | None = None
    before: str | None = None
    only: str | None = None

    def of(self, subjects: list[_Subject]) -> list[_Subject]:
        if self.only is not None:
            return [subject for subject in subjects if subject.window_id == self.only]
        if self.before is not None:
            subjects = [subject for subject in subjects if subject.window_id < self.before]
        return subjects if self.limit is None else subjects[-self.limit :]


async def window_reports(
    store: Store,
    windows: WindowSettings,
    checked: CheckedRows,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    clock: Clock | None = None,
    page: Page | None = None,
) -> list[WindowReport]:
    """Return a report of every window with rows or a state, oldest first.

    A range ``[since, until)`` of starts limits them, but half-finished windows are always included.
    Only the rows of the windows that are left are checked.

    Args:
        page: the part of these windows to report on.
    """
    require_game_tables(store)
    clock = clock or await read_clock(store)
    minutes = windows.minutes
    first = window_at(since, minutes) if since else None
    start = first.start if first else None
    end = window_at(until - _INSTANT, minutes).end if until else None
    subjects = {row.window_id: _stored_subject(row, minutes) for row in await list_windows(store)}
    # The counts of a finished window come from its run, so its rows are not read and checked again.
    async for row in _untrained(store, start, end):
        _subject_of(row, subjects, minutes).rows.append(row)
    shown = [
        subjects[window_id]
        for window_id in sorted(subjects)
        if (
            (first is None or window_id >= first.id)
            and (until is None or window_id < f"{until:%Y-%m-%dT%H:%M}")
        )
        or _is_half_finished(subjects[window_id])
    ]
    shown = page.of(shown) if page else shown
    await _check(store, shown, checked)
    for subject in shown:
        if subject.window is not None and not (subject.finished or subject.of_recipe):
            subject.awaited = await awaits_outcomes(
                store, subject.window, clock.now, windows.outcomes_wait_s
            )
    oldest = min((one.window_id for one in shown), default="")
    for window_id, alarms in (await alarms_since(store, oldest)).items():
        if window_id in subjects:
            subjects[window_id].alarms = tuple(alarm.reason for alarm in alarms)
    counts = await count_windows(store, oldest)
    missed_by_window = Counter(row.window_id for row in await missed_rows(store, start, end))
    for window_id, missed in missed_by_window.items():
        counts.setdefault(window_id, WindowCounts()).late += missed
    return [
        subject.report(counts.get(subject.window_id, WindowCounts()), windows, clock)
        for subject in shown
    ]


async def _check(store: Store, subjects: list[_Subject], checked: CheckedRows) -> None:
    by_id: dict[str, _Subject] = {}
    work: list[tuple[NarrowRow, Window]] = []
    for subject in subjects:
        if subject.window is None:
            subject.reject_all()
            continue
        work += [(row, subject.window) for row in subject.rows]
        by_id |= dict.fromkeys((row.trajectory_id for row in subject.rows), subject)
    async for row, rejection in checked.check(store, work):
        by_id[row.trajectory_id].count(row, rejection)


def _is_half_finished(subject: _Subject) -> bool:
    return subject.row is not None and subject.row.state == WindowState.TRAINED


def _subject_of(row: NarrowRow, subjects: dict[str, _Subject], minutes: int) -> _Subject:
    """Return the subject of the window in which the row started.

    Where a window of another length was finished under the same id, the rows behind its end stay in
    windows of that length: a new one cannot be claimed under an id that is done.
    """
    if row.start is None:
        return subjects.setdefault(NO_DATE, _Subject(NO_DATE, None, problem=_UNDATED))
    window = window_at(row.start, minutes)
    held = subjects.get(window.id)
    if held is not None and held.window is not None and not held.window.contains(row.start):
        window = window_at(row.start, held.window.minutes)
    return subjects.setdefault(window.id, _Subject(window.id, None, window))


def _stored_subject(row: WindowRow, minutes: int) -> _Subject:
    """Return the subject of a stored window.

    A window that is finished or in work keeps its length. Any other one has the present length when
    it is claimed again, if a window of that length starts there.
    """
    window = parse_window_id(row.window_id, row.minutes)
    if row.state not in FINISHED and not row.leased and not window.recipe:
        today = window_at(window.start, minutes)
        window = today if today.start == window.start else window
    return _Subject(row.window_id, row, window)


async def _untrained(
    store: Store, since: datetime | None, until: datetime | None
) -> AsyncIterator[NarrowRow]:
    arguments = (since, until, await finished_play(store))
    async with store.game.acquire() as connection, connection.transaction(readonly=True):
        async for rows in in_batches(connection, _ROWS, *arguments, size=_ROWS_AT_A_TIME):
            ids, agents = ([row[name] for row in rows] for name in ("trajectory_id", "agent_id"))
            free = await free_for_training(store, ids, agents)
            for row in rows:
                if row["trajectory_id"] in free:
                    yield NarrowRow(**row)
