"""Database URLs: arguments for ``asyncpg.connect``, and the address without its password."""

from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from babylon.core.errors import ConfigError

_SCHEMES = {"postgres", "postgresql", "postgresql+asyncpg"}
# Parameters of the game's Prisma client that Postgres rejects.
_PRISMA_ONLY = {
    "connect_timeout", "connection_limit", "pgbouncer", "pool_timeout", "schema", "socket_timeout",
}  # fmt: skip


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
