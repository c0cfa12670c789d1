"""Records what an agent does, and writes it as the game's own rows when the trajectory ends.

A trajectory belongs to the window in which it started, and no step of it lies outside: an agent
that plays on over the boundary finishes one trajectory and starts the next.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import asyncpg

from babylon.core.errors import DatabaseError, RecorderError, WindowError
from babylon.core.failpoints import failpoint
from babylon.core.windows import Window, window_at
from babylon.recorder.records import Action, LlmCall, ProviderAccess, encode_step
from babylon.recorder.rows import Played, Row, call_row, insert_rows, trajectory_row
from babylon.store import Store, require_game_tables

_MAX_SCENARIO_ID = 100  # what the game's column holds


def utc_now() -> datetime:
    return datetime.now(UTC)


class TrajectoryRecorder:
    """Any number of agents may share one recorder.

    ``clock`` gives the time where a call does not (``at``); simulated time is as good as any.
    """

    def __init__(
        self, store: Store, *, minutes: int = 60, clock: Callable[[], datetime] = utc_now
    ) -> None:
        require_game_tables(store)
        self._store = store
        self._minutes = minutes
        self._clock = clock
        self._open: dict[str, Played] = {}

    def start(
        self,
        agent_id: str,
        scenario_id: str | None = None,
        *,
        at: datetime | None = None,
        trajectory_id: str | None = None,
    ) -> str:
        """Begin a trajectory; the scenario is the window itself where none is named."""
        start = moment_in_utc(at, self._clock)
        window = window_at(start, self._minutes)
        name = trajectory_id or uuid4().hex
        scenario = scenario_id or window.id
        if len(scenario) > _MAX_SCENARIO_ID:
            raise RecorderError(
                f"scenario id {scenario!r} is longer than {_MAX_SCENARIO_ID} characters: shorten it"
            )
        if name in self._open:
            raise RecorderError(f"trajectory {name!r} is being recorded already: finish it first")
        self._open[name] = Played(name, agent_id, scenario, window, start, start)
        return name

    def window(self, trajectory_id: str) -> Window:
        """The window a trajectory belongs to; play after its end is another trajectory's."""
        return self._find(trajectory_id).window

    def next_step(self, trajectory_id: str) -> int:
        """The number that the next step will have, for the headers of its requests."""
        return len(self._find(trajectory_id).steps)

    def step(
        self,
        trajectory_id: str,
        *,
        environment_state: Mapping[str, Any],
        llm_calls: Sequence[LlmCall],
        action: Action,
        reward: float,
        provider_accesses: Sequence[ProviderAccess] = (),
        at: datetime | None = None,
    ) -> int:
        """Add a step, in time order; returns its number.

        Raises:
            WindowError: the moment is not in the trajectory's window, or before the last step.
            RecorderError: a value cannot be stored; the step was not added.
        """
        played = self._find(trajectory_id)
        moment = moment_in_utc(at, self._clock)
        if not played.last <= moment < played.window.end:
            raise WindowError(
                f"trajectory {trajectory_id}: a step at {moment.isoformat()} is not between its"
                f" last moment {played.last.isoformat()} and the end of window {played.window.id}:"
                " finish it and start another"
            )
        number = len(played.steps)
        step = encode_step(
            number, moment, environment_state, provider_accesses, llm_calls, action, reward
        )
        calls = [call_row(played, number, i, call, moment) for i, call in enumerate(llm_calls)]
        played.steps.append(step)
        played.calls.extend(calls)
        played.last = moment
        played.total_reward += reward
        played.counts["errors"] += not action.success
        played.counts["trades"] += action.success and action.is_trade
        played.counts["posts"] += action.success and action.action_type == "CREATE_POST"
        return number

    async def finish(
        self,
        trajectory_id: str,
        *,
        final_balance: float | None = None,
        final_pnl: float | None = None,
        status: str = "completed",
        game_knowledge: Mapping[str, Any] | None = None,
        at: datetime | None = None,
    ) -> None:
        """Write the trajectory and its calls in one transaction, and forget it.

        ``final_pnl`` is the agent's lifetime profit in USD, as the game means it;
        ``game_knowledge`` is ground truth for the judge alone.

        Raises:
            DatabaseError: the row is there already, or the game does not know the agent.
        """
        played = self._find(trajectory_id)
        row = trajectory_row(
            played,
            end=max(moment_in_utc(at, self._clock), played.last),
            now=self._clock(),
            final={"finalBalance": final_balance, "finalPnL": final_pnl},
            status=status,
            knowledge=dict(game_knowledge or {}),
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
                await insert_rows(connection, "trajectories", [row])
                failpoint("recorder.inserted")
                await insert_rows(connection, "llm_call_logs", calls)
            except asyncpg.ForeignKeyViolationError as error:
                raise DatabaseError(
                    f"agent {row['agentId']!r} is not a user of this game ({error.detail}):"
                    " register it in the game first"
                ) from error
            except asyncpg.UniqueViolationError as error:
                raise DatabaseError(
                    f"trajectory {row['trajectoryId']!r} is stored already: {error.detail}"
                ) from error

    def _find(self, trajectory_id: str) -> Played:
        played = self._open.get(trajectory_id)
        if played is None:
            raise RecorderError(
                f"trajectory {trajectory_id!r} is not being recorded: call start first"
            )
        return played


def moment_in_utc(at: datetime | None, clock: Callable[[], datetime]) -> datetime:
    """The given moment, or the clock's.

    Raises:
        RecorderError: it has no time zone, so which moment it means is anybody's guess.
    """
    moment = at or clock()
    if moment.tzinfo is None:
        raise RecorderError(f"time {moment.isoformat()} has no time zone: pass tzinfo=UTC")
    return moment.astimezone(UTC)
