"""The recorder of trajectories. It writes the game's own rows when a trajectory ends.

A trajectory belongs to the window in which it started, and all its steps lie in that window. An
agent that plays across the boundary finishes one trajectory and starts the next.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from uuid import uuid4

import asyncpg

from babylon.core.errors import DatabaseError, RecorderError, WindowError
from babylon.core.failpoints import failpoint
from babylon.core.windows import Window, window_at
from babylon.recorder.trajectory_rows import (
    Action,
    LlmCall,
    OpenTrajectory,
    ProviderAccess,
    Row,
    insert_statement,
    trajectory_row,
)
from babylon.store import Store, require_game_tables

_MAX_SCENARIO_ID = 100  # characters in the game's column


def utc_now() -> datetime:
    return datetime.now(UTC)


class TrajectoryRecorder:
    """Recorder of any number of trajectories at once.

    ``minutes`` is the length of windows. ``clock`` gives the time of a call without ``at``; it may
    be simulated.
    """

    def __init__(
        self, store: Store, *, minutes: int = 60, clock: Callable[[], datetime] = utc_now
    ) -> None:
        require_game_tables(store)
        self._store = store
        self._minutes = minutes
        self._clock = clock
        self._open: dict[str, OpenTrajectory] = {}

    def start(
        self,
        agent_id: str,
        scenario_id: str | None = None,
        *,
        at: datetime | None = None,
        trajectory_id: str | None = None,
    ) -> str:
        """Start a trajectory and return its id. The default scenario is the window.

        Raises:
            RecorderError: the scenario id is too long, or the trajectory is open already.
        """
        start = moment_in_utc(at, self._clock)
        window = window_at(start, self._minutes)
        name = trajectory_id or uuid4().hex
        scenario = scenario_id or window.id
        if len(scenario) > _MAX_SCENARIO_ID:
            raise RecorderError(
                f"scenario id {scenario!r} is longer than {_MAX_SCENARIO_ID} characters: shorten it"
            )
        if name in self._open:
            raise RecorderError(f"trajectory {name!r} is open already: finish it first")
        self._open[name] = OpenTrajectory(name, agent_id, scenario, window, start, start)
        return name

    def window(self, trajectory_id: str) -> Window:
        """Return the window of an open trajectory."""
        return self._find(trajectory_id).window

    def next_step(self, trajectory_id: str) -> int:
        """Return the number of the next step, for the ``x-babylon-step`` header of its requests."""
        return len(self._find(trajectory_id).steps)

    def step(
        self,
        trajectory_id: str,
        *,
        environment_state: Mapping[str, object],
        llm_calls: Sequence[LlmCall],
        action: Action,
        reward: float,
        provider_accesses: Sequence[ProviderAccess] = (),
        at: datetime | None = None,
    ) -> int:
        """Add a step and return its number. Steps come in time order.

        ``environment_state`` must have the keys ``agentBalance`` (USD), ``agentPnL`` (USD, the
        agent's lifetime P&L) and ``openPositions``; it may have more.

        Raises:
            WindowError: the time is outside the trajectory's window or before its last step.
            RecorderError: a key is missing or a value cannot be stored. The step is not added.
        """
        played = self._find(trajectory_id)
        moment = moment_in_utc(at, self._clock)
        if not played.last <= moment < played.window.end:
            raise WindowError(
                f"trajectory {trajectory_id}: a step at {moment.isoformat()} is not between its"
                f" last step {played.last.isoformat()} and the end of window {played.window.id}:"
                " finish the trajectory and start another"
            )
        return played.add_step(
            moment, environment_state, llm_calls, action, reward, provider_accesses
        )

    async def finish(
        self,
        trajectory_id: str,
        *,
        final_balance: float | None = None,
        final_pnl: float | None = None,
        status: str = "completed",
        game_knowledge: Mapping[str, object] | None = None,
        at: datetime | None = None,
    ) -> None:
        """Write the trajectory and its calls in one transaction, and close it.

        ``final_balance`` and ``final_pnl`` are in USD; ``final_pnl`` is the agent's lifetime P&L.
        ``game_knowledge`` is ground truth that only the judge sees.

        Raises:
            DatabaseError: the trajectory is stored already, or the game does not know the agent.
        """
        played = self._find(trajectory_id)
        row = trajectory_row(
            played,
            end=max(moment_in_utc(at, self._clock), played.last),
            now=self._clock(),
            final={"finalBalance": final_balance, "finalPnL": final_pnl},
            status=status,
            knowledge=game_knowledge or {},
        )
        failpoint("recorder.before")
        await self._write(row, played.calls)
        failpoint("recorder.after")
        del self._open[trajectory_id]

    async def _write(self, row: Row, calls: Sequence[Row]) -> None:
        async with self._store.pool.acquire() as connection, connection.transaction():
            if self._store.game_tables_ours:
                await connection.execute(
                    'INSERT INTO "User" (id, username, "displayName", "isAgent")'
                    " VALUES ($1, $1, $1, true) ON CONFLICT DO NOTHING",
                    row["agentId"],
                )
            try:
                await connection.executemany(*insert_statement("trajectories", [row]))
                failpoint("recorder.inserted")
                if calls:
                    await connection.executemany(*insert_statement("llm_call_logs", calls))
            except asyncpg.ForeignKeyViolationError as error:
                raise DatabaseError(
                    f"agent {row['agentId']!r} is not a user of this game ({error.detail}):"
                    " register it in the game first"
                ) from error
            except asyncpg.UniqueViolationError as error:
                raise DatabaseError(
                    f"trajectory {row['trajectoryId']!r} is stored already: {error.detail}"
                ) from error

    def _find(self, trajectory_id: str) -> OpenTrajectory:
        played = self._open.get(trajectory_id)
        if played is None:
            raise RecorderError(f"trajectory {trajectory_id!r} is not open: call start first")
        return played


def moment_in_utc(at: datetime | None, clock: Callable[[], datetime]) -> datetime:
    """Return the given moment or the clock's, in UTC.

    Raises:
        RecorderError: the moment has no time zone.
    """
    moment = at or clock()
    if moment.tzinfo is None:
        raise RecorderError(f"time {moment.isoformat()} has no time zone: pass tzinfo=UTC")
    return moment.astimezone(UTC)
