"""The database's clock and its open transactions.

Windows close and leases end by the database's clock, because all workers share it.
"""

from babylon.core.windows import Clock
from babylon.store.connection import Connection, Store

# A transaction gets its id with its first write, so readers are never counted as writers. Without
# pg_read_all_stats the server hides the age and state of other accounts' sessions.
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
    """Read the clock on a connection of its own."""
    async with store.pool.acquire() as connection:
        return await clock_of(connection)


async def clock_of(connection: Connection) -> Clock:
    """Read the clock on this connection; inside a transaction too it is the present time."""
    row = await connection.fetchrow(_CLOCK)
    assert row is not None
    return Clock(**row)
