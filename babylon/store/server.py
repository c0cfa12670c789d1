"""The database server, the one that ``DATABASE_URL`` names or else the embedded one, and its URL.

The embedded server is imported only when it is used, because it does not run on Windows.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from babylon.core.errors import ConfigError, DatabaseError
from babylon.core.home import Home
from babylon.core.settings import DatabaseSettings

log = logging.getLogger(__name__)
LOOK_S = 1.0
_SCHEMES = {"postgres", "postgresql", "postgresql+asyncpg"}
# Parameters of the game's Prisma client that Postgres rejects.
_PRISMA_ONLY = {
    "connect_timeout", "connection_limit", "pgbouncer", "pool_timeout", "schema", "socket_timeout",
}  # fmt: skip


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
        watch = asyncio.create_task(_watch(server.revive, f"see {server.log}"))
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.wait([watch])


async def _watch(revive: Callable[[], bool], hint: str) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            if await asyncio.to_thread(revive):
                log.warning("the embedded Postgres died and was restarted; %s", hint)
        except DatabaseError as error:  # try again: a full disk may have room later
            log.error("the embedded Postgres died: %s", error)


def connect_arguments(url: str) -> dict[str, Any]:
    """Return the arguments for ``asyncpg.connect`` and ``asyncpg.create_pool``.

    Sessions run in UTC. Prisma's parameters work as they do in Prisma: ``schema`` names the schema
    of the game's tables, ``public`` by default, and ``pgbouncer=true`` turns prepared statements
    off. Its other parameters are dropped.

    Raises:
        ConfigError: the URL is not a Postgres URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES:
        raise ConfigError(
            f"DATABASE_URL starts with {parts.scheme!r}: write postgresql://USER:PASSWORD@HOST/NAME"
        )
    place(url)  # checks the port
    query = dict(parse_qsl(parts.query))
    rest = {name: value for name, value in query.items() if name not in _PRISMA_ONLY}
    dsn = urlunsplit(parts._replace(scheme="postgresql", query=urlencode(rest)))
    # Postgres' default search path starts with a schema named like the account. For an account
    # called babylon that is our own schema, so the path is always set.
    schema = query.get("schema", "public").replace('"', '""')
    server_settings = {
        "timezone": "UTC",
        "application_name": "babylon",
        "search_path": f'"{schema}"',
    }
    arguments: dict[str, Any] = {"dsn": dsn, "server_settings": server_settings, "timeout": 10}
    if query.get("pgbouncer") == "true":
        arguments["statement_cache_size"] = 0
    return arguments


def place(url: str) -> str:
    """Return ``host:port/database`` for messages, without the password.

    Raises:
        ConfigError: the port is not a number between 0 and 65535.
    """
    parts = urlsplit(url)
    try:
        port = parts.port or 5432
    except ValueError as error:
        raise ConfigError(f"DATABASE_URL names no usable port: {error}") from error
    return f"{parts.hostname or 'localhost'}:{port}{parts.path}"
