"""The play of windows: its uses, and the removal of its rows in small transactions.

The rows of ``windows`` and ``trained`` stay for ever: they are what keeps a window and a trajectory
from being trained twice.
"""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime

import asyncpg

from babylon.core.windows import GAME_MINUTES, Window, WindowState, outcome_ids, window_at
from babylon.store.connection import Connection, Store, affected

_BY_WINDOW = (
    *("scores", "rejections", "collected", "judgments", "late"),
    *("attempts", "window_health", "sampled_replies"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowUse:
    """The facts of a window that decide about its play.

    ``changed_at``: the last change of its state. ``has_checkpoint``: the policy trained on it still
    has its files. ``retired``: its play was removed. ``artifacts``: references of the last scoring.
    """

    window_id: str
    minutes: int
    state: WindowState
    leased: bool
    changed_at: datetime
    has_checkpoint: bool
    retired: bool
    artifacts: tuple[str, ...]

    @property
    def is_scored(self) -> bool:
        return bool(self.artifacts)


async def window_uses(store: Store) -> list[WindowUse]:
    """Return the uses of every window that was ever claimed."""
    return [_use(row) for row in await store.pool.fetch(_USES)]


@asynccontextmanager
async def held_as(store: Store, use: WindowUse) -> AsyncIterator[bool]:
    """Yield True if the window is still as read; no worker can claim it until the block ends.

    A window that a worker is about to claim is skipped, not waited for.
    """
    async with store.pool.acquire() as connection, connection.transaction():
        # An object store may need longer to delete than a session may rest.
        await connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        row = await connection.fetchrow(
            f"{_USES} WHERE w.window_id = $1 FOR UPDATE OF w SKIP LOCKED", use.window_id
        )
        yield row is not None and _use(row) == use


def _use(row: asyncpg.Record) -> WindowUse:
    artifacts = tuple(uri for uri in row["artifacts"] if uri)
    return WindowUse(**{**row, "state": WindowState(row["state"]), "artifacts": artifacts})


async def running_experiment_began(store: Store) -> datetime | None:
    """Return when the running experiment began, None if none runs."""
    began: datetime | None = await store.pool.fetchval(
        "SELECT min(created_at) FROM babylon.routes WHERE salt ="
        " (SELECT salt FROM babylon.routes ORDER BY route_version DESC LIMIT 1)"
    )
    return began


async def published_since(store: Store, moment: datetime) -> bool:
    """Return True if any host entered a file in the ledger of the dataset since the moment."""
    found: bool = await store.pool.fetchval(
        "SELECT EXISTS (SELECT FROM babylon.published WHERE published_at >= $1)", moment
    )
    return found


async def remove_play(store: Store, window: Window, before: datetime) -> bool:
    """Remove a window's rows, and in a database of ours the game's rows of its time.

    Return False, and remove nothing, if a worker has claimed it meanwhile, or if it changed after
    ``before``: a worker may have claimed and ended it.
    """
    async with store.pool.acquire() as connection, connection.transaction():
        # A window that a worker is about to claim is skipped, not waited for.
        locked = await connection.fetchval(
            "SELECT true FROM babylon.windows WHERE window_id = $1 AND state <> 'trained'"
            " AND coalesce(lease_until < now(), true) AND updated_at < $2 FOR UPDATE SKIP LOCKED",
            window.key,
            before,
        )
        if not locked:
            return False
        for table in _BY_WINDOW:
            await connection.execute(
                f"DELETE FROM babylon.{table} WHERE window_id = $1", window.key
            )
        # Settings and fitness of siblings stay. ``trained`` has the play of the chosen one.
        await connection.execute(
            "UPDATE babylon.siblings SET trajectory_ids = '{}'"
            " WHERE window_id = $1 AND trajectory_ids <> '{}'",
            window.key,
        )
        await connection.execute(
            "DELETE FROM babylon.training_jobs WHERE window_id = $1"
            " AND status IN ('done', 'failed', 'expired')",
            window.key,
        )
        if store.game_tables_ours and not window.recipe:
            await _remove_game_rows(connection, window, before)
        await connection.execute(
            "UPDATE babylon.windows SET scored = NULL, collected_at = NULL,"
            " retired_at = clock_timestamp() WHERE window_id = $1",
            window.key,
        )
        return True


async def imported_later(
    store: Store, windows: Collection[Window], before: datetime
) -> list[Window]:
    """Return those of ``windows``, whose play was removed, into which rows were imported since.

    Rows that were imported after ``before`` do not count yet.
    """
    if not store.game_tables_ours:
        return []
    hours = [window for window in windows if not window.recipe]
    times = [window.start for window in hours], [window.end for window in hours]
    rows = await store.pool.fetch(_IMPORTED, *times, before)
    return [hours[row["number"] - 1] for row in rows]


async def _remove_game_rows(connection: Connection, window: Window, before: datetime) -> None:
    """Remove the game's rows of a window in portions: those of a large one take minutes."""
    ids = [row[0] for row in await connection.fetch(_OLD, window.start, window.end, before)]
    for at in range(0, len(ids), _PLAYS_AT_A_TIME):
        for table in ("llm_call_logs", "reward_judgments", "trajectories"):
            await connection.execute(
                f'DELETE FROM {table} WHERE "trajectoryId" = ANY($1::text[])',
                ids[at : at + _PLAYS_AT_A_TIME],
            )
    hour = window_at(window.start, GAME_MINUTES)
    while hour.start < window.end:
        await connection.execute(_OUTCOMES, hour.start, hour.end, outcome_ids(hour))
        hour = hour.next()


async def remove_observations(store: Store, before: datetime, kept: Collection[Window]) -> None:
    """Remove observations from ``before``, except those in the time of ``kept`` windows.

    Windows that nobody claimed have some too. The newest of a question stay: a later window needs
    them to tell whether the question is open.
    """
    times = [asyncpg.Range(one.start, one.end) for one in kept]
    while affected(await store.pool.execute(_OBSERVED, before, times, _PORTION)) == _PORTION:
        pass


_PLAYS_AT_A_TIME = 200  # each with up to hundreds of calls
_PORTION = 5000  # rows that a statement removes: millions take longer than a query may
# By place, because a tracker that merges into a row gives it another place, and the row stays.
_OBSERVED = """
DELETE FROM babylon.observations WHERE ctid = ANY(ARRAY(
    SELECT o.ctid FROM babylon.observations o
    WHERE o.last_at < $1 AND NOT $2::tstzmultirange @> o.first_at
      AND (o.kind = 'price' OR EXISTS (
          SELECT FROM babylon.observations newer
          WHERE newer.kind = o.kind AND newer.name = o.name AND newer.window_id > o.window_id))
    LIMIT $3
))
"""

_USES = """
SELECT w.window_id, w.minutes, w.state, coalesce(w.lease_until > now(), false) AS leased,
       w.updated_at AS changed_at,
       EXISTS (SELECT FROM babylon.policies p
               WHERE p.batch_id = w.batch_id AND p.removed_at IS NULL) AS has_checkpoint,
       coalesce(w.retired_at > w.updated_at, false) AS retired,
       ARRAY[w.scored #>> '{artifact,uri}', w.scored #>> '{held_out,uri}'] AS artifacts
FROM babylon.windows w
"""

# Parameters: the start and the end of the time.
IN_TIME = (
    "\"startTime\" >= $1::timestamptz AT TIME ZONE 'UTC'"
    " AND \"startTime\" < $2::timestamptz AT TIME ZONE 'UTC'"
)
# What was imported lately stays, however old it is: nobody has trained it.
_OLD = f"""
SELECT "trajectoryId" FROM trajectories
WHERE {IN_TIME} AND "createdAt" < $3::timestamptz AT TIME ZONE 'UTC'
"""
_IMPORTED = """
SELECT number FROM unnest($1::timestamptz[], $2::timestamptz[])
    WITH ORDINALITY AS w (starts, ends, number)
WHERE EXISTS (SELECT FROM trajectories
              WHERE "startTime" >= starts AT TIME ZONE 'UTC'
                AND "startTime" < ends AT TIME ZONE 'UTC'
                AND "createdAt" < $3::timestamptz AT TIME ZONE 'UTC')
"""
# Windows shorter than an hour share the truth of the hour.
_OUTCOMES = (
    'DELETE FROM market_outcomes WHERE "windowId" = ANY($3::text[])'
    f" AND NOT EXISTS (SELECT FROM trajectories WHERE {IN_TIME})"
)
