"""Turns of the processes that share one Prefect: supervisors, and workers of the pool ``cpu``.

A process that dies gives its turn back.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from babylon.core.errors import DatabaseError
from babylon.store.connection import Store, one_line, unlimited

_SETTING_UP, _TELLING = 0x7365_7475_70, 0x6E65_7773  # "setup", "news"
_LONGEST_S = 600.0


@asynccontextmanager
async def setting_up(store: Store) -> AsyncIterator[None]:
    """Wait until no other process sets Prefect up: two would make the same automation twice.

    Raises:
        DatabaseError: the connection, which holds the turn, broke meanwhile.
    """
    try:
        async with unlimited(store) as connection:
            await connection.execute(
                "SELECT pg_advisory_xact_lock($1)", _SETTING_UP, timeout=_LONGEST_S
            )
            yield
    except asyncpg.InterfaceError as error:
        raise DatabaseError(
            f"the connection to the database broke while Prefect was set up ({one_line(error)}):"
            " see the database's log, then run this again"
        ) from error


@asynccontextmanager
async def telling(store: Store) -> AsyncIterator[bool]:
    """Yield True if no other process tells news at this moment: two would alert twice."""
    async with unlimited(store) as connection:
        yield await connection.fetchval("SELECT pg_try_advisory_xact_lock($1)", _TELLING)
