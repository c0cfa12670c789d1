"""The locks of backups and retention, so that no file disappears while it is copied."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from babylon.store.connection import Store, unlimited

_KEY = 0x6261_636B_7570  # "backup"
_RETENTION_KEY = 0x7265_7469_7265  # "retire"
_LONGEST_S = 24 * 3600.0  # the first retention of a large database may take hours
_TRY = "SELECT pg_try_advisory_xact_lock($1)"


@asynccontextmanager
async def backup_lock(store: Store) -> AsyncIterator[None]:
    """Hold the lock of backups, which they share; wait for a running retention first."""
    async with unlimited(store) as connection:
        await connection.execute(
            "SELECT pg_advisory_xact_lock_shared($1)", _KEY, timeout=_LONGEST_S
        )
        yield


@asynccontextmanager
async def retention_lock(store: Store) -> AsyncIterator[str]:
    """Hold the locks of retention, and yield ""; yield what runs instead if they are not free."""
    async with unlimited(store) as connection:
        # With one lock for both, a second retention would take the first for a backup.
        if not await connection.fetchval(_TRY, _RETENTION_KEY):
            yield "another retention"
        elif not await connection.fetchval(_TRY, _KEY):
            yield "a backup"
        else:
            yield ""
