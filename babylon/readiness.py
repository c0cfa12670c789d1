"""Which windows could be trained now, and what the others lack (``windows list``, ``check``).

The same checks as in ``validate`` run over every row that was never trained, streamed, and nothing
is written.
"""

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from babylon.errors import WindowError
from babylon.game_rows import COLUMNS, UNTRAINED, GameRow
from babylon.quality.checks import check_row
from babylon.quality.reasons import Reason
from babylon.settings import Settings
from babylon.store import Store, require_game_tables
from babylon.store.rejections import Rejection
from babylon.store.windows import WindowRow, list_windows
from babylon.windows import TRANSITIONS, Window, WindowState, parse_window_id, window_at

_ROWS_AT_A_TIME = 200

_ROWS = f"""
    SELECT {COLUMNS} FROM trajectories t
    WHERE ($1::timestamptz IS NULL OR t."startTime" >= $1 AT TIME ZONE 'UTC') AND {UNTRAINED}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport:
    """One window: what waits there untrained, and what is ``missing`` before it can be trained.

    ``agents`` are the eligible ones; ``eligible`` of ``trajectories`` passed every check, the
    others are counted in ``rejected`` by reason. ``trained`` trajectories are used up: they count
    nowhere else. ``reason`` is what the last run of the window said. Somebody works on a
    ``leased`` one now.
    """

    window_id: str
    minutes: int
    state: WindowState
    complete: bool
    leased: bool
    trajectories: int
    agents: tuple[str, ...]
    eligible: int
    rejected: dict[str, int]
    missing: tuple[str, ...]
    trained: int
    reason: str | None

    @property
    def ready(self) -> bool:
        return not self.missing


class _Tally:
    """What the rows of one window came to; ``window`` is None when none has that id."""

    def __init__(self, window_id: str, row: WindowRow | None, settings: Settings) -> None:
        self.window_id = window_id
        self.minutes = row.minutes if row else settings.minutes
        self.state = row.state if row else WindowState.OPEN
        self.owner = row.owner if row else None
        self.leased = row is not None and row.leased
        self.reason = row.reason if row else None
        self.trained = int(row.metrics.get("trained_trajectories", 0)) if row else 0
        self.seen = row.metrics.get("eligible") if row else None
        self.agents: set[str] = set()
        self.eligible = 0
        self.rejected: Counter[str] = Counter()
        self.window: Window | None = None
        self.problem = ""
        try:
            self.window = parse_window_id(window_id, self.minutes)
        except WindowError as error:
            self.problem = str(error)

    def add(self, row: GameRow, settings: Settings) -> None:
        if self.window is None:
            self.rejected[str(Reason.OTHER_WINDOW)] += 1
            return
        verdict = check_row(row, self.window, settings)
        if isinstance(verdict, Rejection):
            self.rejected[str(verdict.reason)] += 1
        else:
            self.agents.add(row.agent_id)
            self.eligible += 1

    def report(self, min_agents: int, now: datetime, grace_s: float) -> WindowReport:
        return WindowReport(
            window_id=self.window_id,
            minutes=self.minutes,
            state=self.state,
            complete=self.window is not None and self.window.is_complete(now),
            leased=self.leased,
            trajectories=self.eligible + self.rejected.total(),
            agents=tuple(sorted(self.agents)),
            eligible=self.eligible,
            rejected=dict(self.rejected.most_common()),
            missing=tuple(self._missing(min_agents, now, grace_s)),
            trained=self.trained,
            reason=self.reason,
        )

    def _missing(self, min_agents: int, now: datetime, grace_s: float) -> Iterator[str]:
        if self.window is None:
            yield self.problem
        elif not self.window.is_complete(now):
            yield f"the window is not over: it ends at {self.window.end:%Y-%m-%dT%H:%M} UTC"
        elif now < (settled := self.window.settled_at(grace_s)):
            yield f"rows may still arrive, until {settled:%Y-%m-%dT%H:%M:%S} UTC"
        if self.leased:
            yield f"{self.owner} is training it now"
        if self.state == WindowState.TRAINED:
            yield f"trained, waits for validation: run train --window {self.window_id}"
            return
        if WindowState.CLAIMED not in TRANSITIONS[self.state]:
            yield f"already trained: the window is {self.state}"
            return
        if len(self.agents) < min_agents:
            yield f"{len(self.agents)} eligible agents, minimum is {min_agents}"
        elif self.state == WindowState.SKIPPED and self.eligible == self.seen:
            yield f"{self.reason}; nothing was played since (train --window tries it again)"


async def window_reports(
    store: Store,
    settings: Settings,
    *,
    lookback_hours: float | None = None,
    min_agents: int | None = None,
    now: datetime | None = None,
) -> list[WindowReport]:
    """All windows with untrained rows or a state, oldest first; with a lookback the newest ones
    and those that are half-finished."""
    require_game_tables(store)
    now = now or datetime.now(UTC)
    oldest = None
    if lookback_hours is not None:
        oldest = window_at(now - timedelta(hours=lookback_hours), settings.minutes)
    known = {row.window_id: row for row in await list_windows(store)}
    tallies = {window_id: _Tally(window_id, row, settings) for window_id, row in known.items()}
    async for row in _untrained(store, oldest.start if oldest else None):
        window_id = row.window_id
        if window_id is None:  # as in collect: an empty id is an id, and no window's
            start = row.start
            window_id = window_at(start, settings.minutes).id if start else "no date"
        if window_id not in tallies:
            tallies[window_id] = _Tally(window_id, None, settings)
        tallies[window_id].add(row, settings)
    return [
        tallies[window_id].report(min_agents or settings.min_agents, now, settings.grace_s)
        for window_id in sorted(tallies)
        if oldest is None
        or window_id >= oldest.id
        or tallies[window_id].state == WindowState.TRAINED  # has to be finished, however old
    ]


async def _untrained(store: Store, since: datetime | None) -> AsyncIterator[GameRow]:
    async with store.pool.acquire() as connection, connection.transaction(readonly=True):
        async for record in connection.cursor(_ROWS, since, prefetch=_ROWS_AT_A_TIME):
            yield GameRow(**record)
