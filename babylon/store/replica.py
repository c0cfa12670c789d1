"""Waiting for a replica of the game's database, from which play is read."""

import asyncio
from datetime import datetime

from babylon.core.errors import DatabaseError
from babylon.store.connection import Store

PATIENCE_S = 60.0
_POLL_S = 0.2
_HERE = "SELECT pg_current_wal_lsn()::text"
_ARRIVED = "SELECT NOT pg_is_in_recovery() OR pg_last_wal_replay_lsn() >= $1::text::pg_lsn"
# A replica of a primary that nobody writes to has no recent transaction, but has replayed all.
_RECENT = """
SELECT NOT pg_is_in_recovery() OR pg_last_xact_replay_timestamp() >= $1
    OR (pg_last_wal_receive_lsn() = pg_last_wal_replay_lsn()
        AND EXISTS (SELECT FROM pg_stat_wal_receiver))
"""


async def wait_until_replicated(store: Store, until: datetime) -> None:
    """Wait until reads of the game's tables see what was written before ``until``.

    With a replica of our own database they then see all that was written before this call.

    Raises:
        DatabaseError: the replica lags behind by more than ``PATIENCE_S``.
    """
    if store.game is store.pool:
        return
    question, mark = _RECENT, until
    if store.records:
        question, mark = _ARRIVED, await store.pool.fetchval(_HERE)
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not await store.game.fetchval(question, mark):
        if asyncio.get_running_loop().time() > deadline:
            raise DatabaseError(
                f"the replica in GAME_DATABASE_URL lags behind {mark} for {PATIENCE_S:g} s: see"
                " pg_stat_replication on its primary, then run this again"
            )
        await asyncio.sleep(_POLL_S)
