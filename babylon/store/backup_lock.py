"""The lock between a backup and retention, so that no file disappears while it is copied."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from babylon.store.connection import Store

_KEY = 0x6261_636B_7570  # "backup"


@asynccontextmanager
async def backup_lock(store: Store, *, retention: bool) -> AsyncIterator[bool]:
    """Hold the lock for the block, and yield True; yield False to retention during a backup.

    Backups share the lock and wait for a running retention. The transaction holds no snapshot, so
    it delays no vacuum.
    """
    take = (
        "SELECT pg_try_advisory_xact_lock($1)"
        if retention
        else "SELECT pg_advisory_xact_lock_shared($1) IS NOT NULL"
    )
    async with store.pool.acquire() as connection, connection.transaction():
        await connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        yield bool(await connection.fetchval(take, _KEY))
