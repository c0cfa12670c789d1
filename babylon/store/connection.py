"""Opening the store: version check, connection pool, and errors that an operator can act on.

Windows close and leases end by the database's clock, because all workers share it.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import asyncpg
import msgspec
from asyncpg.pool import PoolConnectionProxy

from babylon.core.errors import DatabaseError, FencedError
from babylon.core.home import Home
from babylon.core.settings import DatabaseSettings, Settings
from babylon.core.types import Claim
from babylon.core.windows import Clock
from babylon.store.migrate import HEAD, check_not_newer, current_revision
from babylon.store.migrate import migrate as run_migrations
from babylon.store.server import connect_arguments, database_url, place

# Quoted, because asyncpg's classes are generic in its stubs only.
Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"
Connection: TypeAlias = "PoolConnectionProxy[asyncpg.Record]"

GAME_TABLES = ("trajectories", "llm_call_logs", "market_outcomes")
MAX_CONNECTIONS = 10
CLOSE_S = 10.0
HALTED_S = 60.0  # a worker that halts inside a write loses its locks after this time
UNREACHABLE = (
    DatabaseError,
    OSError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the connection broke in the middle of a query
)
_OPERATOR = (
    ConnectionRefusedError,
    asyncpg.PostgresConnectionError,
    asyncpg.InternalClientError,  # the connection broke in the middle of a cursor
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.ReadOnlySQLTransactionError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """An open, migrated database. ``jsonb`` columns read and write as Python values.

    ``game_tables_ours``: our migrations made the game's tables, so we may write to all of them.
    ``has_game_tables``: the tables of ``GAME_TABLES`` exist, ours or the game's.
    """

    pool: Pool
    game_tables_ours: bool
    has_game_tables: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseStatus:
    """A database's address and version; ``revision`` is ``None`` before the first migration."""

    place: str
    revision: str | None
    head: str
    game_tables_ours: bool | None
    has_game_tables: bool


@asynccontextmanager
async def open_store(settings: Settings, *, migrate: bool = False) -> AsyncIterator[Store]:
    """Open the database that ``settings`` name; the embedded one is always migrated first.

    Raises:
        DatabaseError: the database is down, refuses the connection, or is not migrated.
    """
    async with _open_pool(settings.database, settings.home) as (pool, arguments):
        async with pool.acquire() as connection:
            revision = await current_revision(connection)
        check_not_newer(revision)
        if revision != HEAD:
            if not migrate and settings.database.url is not None:
                raise DatabaseError(
                    f"the database {place(arguments['dsn'])} is at version {revision or 'none'},"
                    f" not {HEAD}: run `babylon db migrate`"
                )
            await run_migrations(arguments)
        async with pool.acquire() as connection:
            ours, present = await _game_tables(connection)
        yield Store(pool=pool, game_tables_ours=bool(ours), has_game_tables=present)


async def database_status(database: DatabaseSettings, home: Home) -> DatabaseStatus:
    """Read the status of a database without changing it, migrated or not."""
    async with _open_pool(database, home) as (pool, arguments), pool.acquire() as connection:
        revision = await current_revision(connection)
        ours, present = await _game_tables(connection, migrated=revision is not None)
        return DatabaseStatus(
            place=place(arguments["dsn"]),
            revision=revision,
            head=HEAD,
            game_tables_ours=ours,
            has_game_tables=present,
        )


def require_game_tables(store: Store) -> None:
    """Check that play can be recorded and collected.

    Raises:
        DatabaseError: the database has no game tables.
    """
    if not store.has_game_tables:
        raise DatabaseError(
            f"the database has no game tables ({', '.join(GAME_TABLES)}): point DATABASE_URL at"
            " the game's database, or unset it for the embedded one"
        )


@asynccontextmanager
async def guarded(store: Store, claim: Claim) -> AsyncIterator[Connection]:
    """Open a transaction that holds the window's row and checks the claim's epoch.

    Raises:
        FencedError: the window has another epoch; nothing was written.
    """
    async with store.pool.acquire() as connection, connection.transaction():
        await connection.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{HALTED_S:g}s'")
        epoch = await connection.fetchval(
            "SELECT epoch FROM babylon.windows WHERE window_id = $1 FOR NO KEY UPDATE",
            claim.window_id,
        )
        if epoch != claim.epoch:
            raise FencedError(
                f"window {claim.window_id}: {claim.owner} holds epoch {claim.epoch}, but epoch"
                f" {epoch} took it over; nothing was written"
            )
        yield connection


def affected(status: str) -> int:
    """Number of rows that a command changed, from its status (``UPDATE 1``)."""
    return int(status.rsplit(" ", 1)[-1])


def one_line(error: Exception) -> str:
    """Postgres' message, detail and hint on one line."""
    return " ".join(str(error).split())


@asynccontextmanager
async def _open_pool(
    database: DatabaseSettings, home: Home
) -> AsyncIterator[tuple[Pool, dict[str, Any]]]:
    async with database_url(database, home) as url:
        arguments = connect_arguments(url)
        with _connecting(url):
            pool = await asyncpg.create_pool(
                **arguments, min_size=1, max_size=MAX_CONNECTIONS, init=_prepare
            )
        try:
            with _working(url):
                yield pool, arguments
        finally:
            await _close(pool)


@contextmanager
def _connecting(url: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # refused, unreachable, unknown host, timed out
        raise DatabaseError(
            f"no database answers at {place(url)} ({error or type(error).__name__}):"
            " start it, or correct DATABASE_URL"
        ) from error
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise DatabaseError(
            f"the database at {place(url)} refuses the connection ({one_line(error)}):"
            " correct DATABASE_URL"
        ) from error


@contextmanager
def _working(url: str) -> Iterator[None]:
    """Turn errors that only the database's operator can repair into one line.

    Other errors pass unchanged: they are bugs.
    """
    try:
        yield
    except asyncpg.InsufficientPrivilegeError as error:
        raise DatabaseError(
            f"the account lacks a right in the database at {place(url)} ({one_line(error)}):"
            " GRANT it, or use another account in DATABASE_URL"
        ) from error
    except _OPERATOR as error:
        raise DatabaseError(
            f"the database at {place(url)} gave up ({one_line(error)}): see its log, then run"
            " this again"
        ) from error


async def _close(pool: Pool) -> None:
    try:
        await asyncio.wait_for(pool.close(), CLOSE_S)
    except TimeoutError:  # a query still runs, or a connection was never released
        pool.terminate()


async def _prepare(connection: "asyncpg.Connection[asyncpg.Record]") -> None:
    await connection.set_type_codec(
        "jsonb",
        schema="pg_catalog",
        encoder=lambda value: msgspec.json.encode(value).decode(),
        decoder=msgspec.json.decode,
    )


async def _game_tables(connection: Connection, migrated: bool = True) -> tuple[bool | None, bool]:
    """Return (are the game's tables ours, do they exist)."""
    ours = await connection.fetchval("SELECT ours FROM babylon.database") if migrated else None
    found = await connection.fetchval(
        "SELECT count(to_regclass(name)) FROM unnest($1::text[]) AS name", list(GAME_TABLES)
    )
    return ours, found == len(GAME_TABLES)


# A transaction gets its id with its first write, so readers are never counted as writers. Without
# pg_read_all_stats the server hides the age and state of other accounts' sessions.
_CLOCK = """
SELECT clock_timestamp() AS now,
       least(min(xact_start) FILTER (WHERE backend_xid IS NOT NULL),
             (SELECT min(prepared) FROM pg_prepared_xacts WHERE database = current_database()))
           AS oldest_writer,
       (count(*) FILTER (WHERE state IS NULL))::int AS hidden
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""


async def read_clock(store: Store) -> Clock:
    """Read the clock on a connection of its own."""
    async with store.pool.acquire() as connection:
        return await clock_of(connection)


async def clock_of(connection: Connection) -> Clock:
    """Read the clock on this connection; inside a transaction too it is the present time."""
    row = await connection.fetchrow(_CLOCK)
    assert row is not None
    return Clock(**row)
