"""From a database URL, as people write it, to the arguments of ``asyncpg.connect``."""

from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from babylon.core.errors import ConfigError

_SCHEMES = {"postgres", "postgresql", "postgresql+asyncpg"}
# What the game's Prisma client understands and Postgres does not.
_PRISMA_ONLY = {
    "connect_timeout", "connection_limit", "pgbouncer", "pool_timeout", "schema", "socket_timeout",
}  # fmt: skip


def connect_arguments(url: str) -> dict[str, Any]:
    """Arguments for ``asyncpg.connect`` and ``asyncpg.create_pool``; sessions run in UTC.

    As with Prisma, the game's tables lie in ``schema``, by default ``public`` (Postgres' own
    default would look into our schema first where the account is called babylon); ``pgbouncer``
    turns prepared statements off; Prisma's other parameters are dropped.

    Raises:
        ConfigError: not a Postgres URL.
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
    """``host:port/database``, for messages: never the password."""
    parts = urlsplit(url)
    try:
        port = parts.port or 5432
    except ValueError as error:
        raise ConfigError(f"DATABASE_URL names no usable port: {error}") from error
    return f"{parts.hostname or 'localhost'}:{port}{parts.path}"
