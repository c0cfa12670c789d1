"""Recording without loss: an answer leaves only when the database has committed its call.

All calls that wait at a moment are written in one transaction (group commit), so the cost of a
commit is shared while each request waits for its own. A database that does not answer fails the
requests: an answer that is not recorded is an answer that training never sees.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import NoReturn

import asyncpg

from babylon.errors import DatabaseError
from babylon.store import Store
from babylon.store.calls import RecordedCall, insert_calls

log = logging.getLogger(__name__)

COMMIT_TIMEOUT_S = 5.0
DATABASE_FAILURES = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)
_Pending = tuple[RecordedCall, "asyncio.Future[None]"]


class CallRecorder:
    """Writes calls while ``run`` runs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pending: list[_Pending] = []
        self._arrived = asyncio.Event()

    async def record(self, call: RecordedCall) -> None:
        """Return once the call is committed.

        Raises:
            DatabaseError: it is not.
        """
        committed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((call, committed))
        self._arrived.set()
        await committed

    async def run(self) -> NoReturn:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            batch, self._pending = self._pending, []
            await self._write(batch)

    async def _write(self, batch: Sequence[_Pending]) -> None:
        failure: DatabaseError | None = None
        try:
            async with asyncio.timeout(COMMIT_TIMEOUT_S):
                await insert_calls(self._store, [call for call, _ in batch])
        except asyncpg.DataError as error:  # one row that the database refuses fails alone
            if len(batch) > 1:
                for pending in batch:
                    await self._write([pending])
                return
            failure = DatabaseError(f"the database refuses call {batch[0][0].call_id}: {error}")
        except DATABASE_FAILURES as error:
            failure = DatabaseError(
                f"the database does not take calls ({error or type(error).__name__}): the answer"
                " is withheld because it would be lost to training, try again"
            )
        if failure:
            log.error("%d calls not recorded: %s", len(batch), failure)
        for _, committed in batch:
            if committed.done():  # its request was cancelled meanwhile
                continue
            if failure:
                committed.set_exception(failure)
            else:
                committed.set_result(None)
