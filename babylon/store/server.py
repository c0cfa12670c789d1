"""The database server, the one that ``DATABASE_URL`` names or else the embedded one, and its URL.

The embedded server is imported only when it is used, because it does not run on Windows.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from babylon.core.errors import DatabaseError
from babylon.core.home import Home
from babylon.core.processes import in_background
from babylon.core.settings import DatabaseSettings

log = logging.getLogger(__name__)
LOOK_S = 1.0


@asynccontextmanager
async def database_url(database: DatabaseSettings, home: Home) -> AsyncIterator[str]:
    """Yield ``DATABASE_URL``, or the address of the embedded server, which runs meanwhile.

    Raises:
        DatabaseError: the embedded server does not start.
    """
    if database.url is not None:
        yield database.url.get_secret_value()
        return
    from babylon.store.embedded import EmbeddedPostgres

    server = EmbeddedPostgres(home.root)
    start = asyncio.ensure_future(asyncio.to_thread(server.acquire))
    try:
        await asyncio.shield(start)
        yield server.url()
    finally:
        await asyncio.wait([start])  # a cancelled caller releases the server too
        await asyncio.to_thread(server.release)


async def stop_left_server(database: DatabaseSettings, home: Home) -> bool:
    """Stop an embedded server whose users were all killed. Return True if there was one.

    Raises:
        DatabaseError: it does not stop.
    """
    if database.url is not None:
        return False
    from babylon.store.embedded import EmbeddedPostgres

    def stop() -> bool:
        server = EmbeddedPostgres(home.root)
        if not server.runs():
            return False
        server.acquire()
        return server.release()  # the last user stops it

    return await asyncio.to_thread(stop)


@asynccontextmanager
async def kept_running(database: DatabaseSettings, home: Home) -> AsyncIterator[None]:
    """Keep the embedded server running: restart it when it dies.

    A server that ``DATABASE_URL`` names is left to its operator.

    Raises:
        DatabaseError: the embedded server does not start at first.
    """
    async with database_url(database, home):
        if database.url is not None:
            yield
            return
        from babylon.store.embedded import EmbeddedPostgres

        server = EmbeddedPostgres(home.root)
        async with in_background(_watch(server.revive, f"see {server.log}")):
            yield


async def _watch(revive: Callable[[], bool], hint: str) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            if await asyncio.to_thread(revive):
                log.warning("the embedded Postgres died and was restarted; %s", hint)
        except (DatabaseError, OSError) as error:  # a full disk may have room later
            log.error("the embedded Postgres died: %s", error)
