"""The database's clock and its open transactions: when the last rows of a window are in.

Windows close and leases end by the clock of the database, the one that all workers share.
"""

from typing import TYPE_CHECKING

from babylon.core.windows import Clock
from babylon.store.connection import Store

if TYPE_CHECKING:
    from babylon.store.connection import Connection

# A transaction gets its id with its first write: readers, however long they read, are no danger.
# Of other accounts' sessions the server hides age and state, unless we have pg_read_all_stats.
_CLOCK = """
SELECT clock_timestamp() AS now,
       least(min(xact_start) FILTER (WHERE backend_xid IS NOT NULL),
             (SELECT min(prepared) FROM pg_prepared_xacts WHERE database = current_database()))
           AS oldest_writer,
       (count(*) FILTER (WHERE state IS NULL))::int AS hidden
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""


async def read_clock(store: Store) -> Clock:
    async with store.pool.acquire() as connection:
        return await clock_of(connection)


async def clock_of(connection: "Connection") -> Clock:
    """Inside the caller's transaction; the time is the present one all the same."""
    row = await connection.fetchrow(_CLOCK)
    assert row is not None
    return Clock(**row)
