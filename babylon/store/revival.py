"""The embedded server is started again when it dies under those who use it.

Whoever supervises services does this, so that an hour of play does not end with the database.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NoReturn

from babylon.core.errors import DatabaseError
from babylon.core.settings import Settings
from babylon.store.connection import database_url

if TYPE_CHECKING:
    from babylon.store.embedded import EmbeddedPostgres

log = logging.getLogger(__name__)
LOOK_S = 1.0


@asynccontextmanager
async def kept_running(settings: Settings) -> AsyncIterator[None]:
    """The embedded server runs while the block runs, whatever kills it; one that ``DATABASE_URL``
    names is its operator's.

    Raises:
        DatabaseError: the server does not start in the first place.
    """
    if settings.database.url is not None:
        yield
        return
    from babylon.store.embedded import EmbeddedPostgres  # not on Windows, which has no wheel

    async with database_url(settings):
        watch = asyncio.create_task(_watch(EmbeddedPostgres(settings.home.root)))
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.wait([watch])


async def _watch(server: "EmbeddedPostgres") -> NoReturn:
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            if await asyncio.to_thread(server.revive):
                log.warning("the embedded Postgres had died and was started; see %s", server.log)
        except DatabaseError as error:  # a full disk, say: it may have room again later
            log.error("the embedded Postgres died: %s", error)
