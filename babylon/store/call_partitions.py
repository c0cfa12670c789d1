"""The partitions of the table ``calls``: one for each UTC day, made ahead and dropped when old.

``calls_first`` has the calls from before the partitions, and of a new database's first week.
``calls_other`` takes the calls of days without a partition. From these two, old calls are deleted.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NoReturn

import asyncpg

from babylon.core.windows import Window
from babylon.store.connection import UNREACHABLE, Connection, Store, affected, read_now

log = logging.getLogger(__name__)
AHEAD = timedelta(days=3)
LOOK_S = 3600.0
_TURN = 0x6361_6C6C_73  # "calls"; the advisory lock for making and dropping partitions
_SHARED = ("calls_first", "calls_other")
_AT_A_TIME = 5000  # calls of one transaction


@dataclass(frozen=True, slots=True)
class CallPartition:
    """A partition; ``None`` for a time stands for no bound on that side."""

    name: str
    starts: datetime | None
    ends: datetime | None

    def is_before(self, moment: datetime, kept: Collection[Window]) -> bool:
        """Return True if it ends before the moment and has no time of a kept window."""
        if self.ends is None or self.ends > moment:
            return False
        return not any(
            one.start < self.ends and (self.starts is None or one.end > self.starts) for one in kept
        )


async def keep_ahead(store: Store) -> NoReturn:
    """Make the partitions of the next days, again and again."""
    while True:
        try:
            # A clock here that is years ahead would make a table for each of their days.
            await make_partitions(store, await read_now(store) + AHEAD)
        except asyncpg.InsufficientPrivilegeError as error:  # no call is lost by it
            log.warning(
                "calls go to babylon.calls_other: no partition is made (%s); let this user create"
                " tables in the schema babylon",
                error,
            )
        except UNREACHABLE as error:
            log.debug("no partition is made now: %r", error)
        await asyncio.sleep(LOOK_S)


async def make_partitions(store: Store, until: datetime) -> None:
    """Make a partition for each day from the last one's end until the moment."""
    while True:
        async with store.pool.acquire() as connection, connection.transaction():
            if not await _turn(connection):
                return
            today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
            ends = [one.ends for one in await _partitions(connection) if one.ends]
            day = max(ends, default=today)
            if day > until:
                return
            name, end = f"calls_{day:%Y%m%d}", day + timedelta(days=1)
            await connection.execute(
                f"CREATE TABLE babylon.{name} (LIKE babylon.calls_other INCLUDING DEFAULTS"
                " INCLUDING INDEXES)"
            )
            await connection.execute(
                f"WITH moved AS (DELETE FROM babylon.calls_other"
                f" WHERE started_at >= '{day}' AND started_at < '{end}' RETURNING *)"
                f" INSERT INTO babylon.{name} SELECT * FROM moved"
            )
            await connection.execute(
                f"ALTER TABLE babylon.calls ATTACH PARTITION babylon.{name}"
                f" FOR VALUES FROM ('{day}') TO ('{end}')"
            )


async def remove_calls(store: Store, before: datetime, kept: Collection[Window]) -> int:
    """Remove calls that were made and recorded ``before``, except those in the time of ``kept``.

    A day goes as a whole, once no window of it is kept. An old trace that was imported lately was
    recorded lately, so it stays, and its day with it.
    """
    removed = 0
    async with store.pool.acquire() as connection:
        partitions = await _partitions(connection)
    for one in partitions:
        if one.is_before(before, kept) and (dropped := await _drop(store, one, before)) is not None:
            removed += dropped
        elif one.name in _SHARED:
            removed += await _delete(store, one.name, before, kept)
    return removed


async def _drop(store: Store, partition: CallPartition, before: datetime) -> int | None:
    """Drop a partition and return its calls; return None, and keep it, if some are new here."""
    table = f"babylon.{partition.name}"
    try:
        async with store.pool.acquire() as connection, connection.transaction():
            if not await _turn(connection):
                return None
            # No import may add a call between the count and the end. Readers go on.
            await connection.execute(f"LOCK TABLE {table} IN SHARE MODE")
            row = await connection.fetchrow(
                "SELECT count(*), count(*) FILTER (WHERE recorded_at >= $1) AS lately"
                f" FROM {table}",
                before,
                timeout=_SCAN_S,
            )
            assert row is not None
            if row["lately"]:
                return None
            await connection.execute(f"DROP TABLE {table}")
    except asyncpg.LockNotAvailableError:  # somebody uses its calls: after the next window
        return None
    return int(row["count"])


async def _delete(store: Store, name: str, before: datetime, kept: Collection[Window]) -> int:
    """Delete from a partition in short transactions, which delay no gateway."""
    times = [asyncpg.Range(one.start, one.end) for one in kept]
    versions = await store.pool.fetch(_ANSWERED.format(name=name))
    removed = 0
    for row in versions:
        done = _AT_A_TIME
        while done == _AT_A_TIME:
            arguments = (row["policy_version"], before, times, _AT_A_TIME)
            done = affected(await store.pool.execute(_CALLS.format(name=name), *arguments))
            removed += done
    return removed


async def _turn(connection: Connection) -> bool:
    """Take the lock of this transaction; later statements wait 0.3 s at most for their own."""
    await connection.execute("SET LOCAL lock_timeout = '300ms'")
    found: bool = await connection.fetchval("SELECT pg_try_advisory_xact_lock($1)", _TURN)
    return found


async def _partitions(connection: Connection) -> Sequence[CallPartition]:
    return [CallPartition(*row) for row in await connection.fetch(_PARTITIONS)]


_SCAN_S = 3600.0
_PARTITIONS = r"""
SELECT name, substring(bound FROM 'FROM \(''([^'']+)')::timestamptz AS starts,
       substring(bound FROM 'TO \(''([^'']+)')::timestamptz AS ends
FROM (SELECT c.relname::text AS name, pg_get_expr(c.relpartbound, c.oid) AS bound
      FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
      WHERE i.inhparent = 'babylon.calls'::regclass) p
ORDER BY ends NULLS LAST
"""

# Each version by one look into the index. An imported call may be of another database's policy.
_ANSWERED = """
WITH RECURSIVE answered AS (
    SELECT min(policy_version) AS policy_version FROM babylon.{name}
    UNION ALL
    SELECT (SELECT min(c.policy_version) FROM babylon.{name} c
            WHERE c.policy_version > a.policy_version)
    FROM answered a WHERE a.policy_version IS NOT NULL
)
SELECT policy_version FROM answered WHERE policy_version IS NOT NULL
"""

# By the index on policy and time, in portions.
_CALLS = """
DELETE FROM babylon.{name} WHERE call_id = ANY(ARRAY(
    SELECT call_id FROM babylon.{name} c
    WHERE policy_version = $1 AND started_at < $2 AND recorded_at < $2
      AND NOT $3::tstzmultirange @> c.started_at
    LIMIT $4
))
"""
