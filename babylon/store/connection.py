"""Opening the store: version check, connection pool, and errors that an operator can act on.

Windows close and leases end by the database's clock, because all workers share it.
"""

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime

import asyncpg

from babylon.core.errors import DatabaseError, DatabaseVersionError, FencedError
from babylon.core.home import Home
from babylon.core.settings import DatabaseSettings, Settings
from babylon.core.types import Claim
from babylon.core.windows import Clock
from babylon.store.address import Address, parse_url
from babylon.store.game_tables import game_problem, is_same_database, tables_present
from babylon.store.migrate import HEAD, check_not_newer, current_revision
from babylon.store.migrate import migrate as run_migrations
from babylon.store.server import database_url
from babylon.store.session import Connection as Connection
from babylon.store.session import Pool as Pool
from babylon.store.session import first_session, open_pool
from babylon.store.session import one_line as one_line

HALTED_S = 30.0  # a worker that halts inside a write loses its locks after this time
UNREACHABLE = (
    DatabaseError,
    OSError,  # with TimeoutError
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
    asyncpg.SerializationError,  # a replica cancels reads that hold up its replay
)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """An open, migrated database. ``jsonb`` columns read and write as Python values.

    ``game``: the pool for reads of the game's tables: ``pool``, or a replica, or another database.
    ``game_tables_ours``: our migrations made the game's tables, so we may write to all of them.
    ``has_game_tables``: the game's tables exist, ours or the game's. ``game_problem`` says what
    they lack to be read. ``records``: what is written to the game's tables is what ``game`` reads.
    ``home``: the place of the files that rows refer to.
    """

    home: Home
    pool: Pool
    game: Pool
    game_tables_ours: bool
    has_game_tables: bool
    game_problem: str
    records: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseStatus:
    """A database's address and version; ``revision`` is ``None`` before the first migration."""

    place: str
    revision: str | None
    head: str
    game_tables_ours: bool | None
    has_game_tables: bool
    pooled: bool


@asynccontextmanager
async def open_store(
    settings: Settings, *, migrate: bool = False, game_may_be_away: bool = False
) -> AsyncIterator[Store]:
    """Open the database that ``settings`` name; the embedded one is always migrated first.

    ``game_may_be_away``: for those that live on our own tables. While ``GAME_DATABASE_URL`` does
    not answer, the store opens all the same, and each read of the game tries to connect.

    Raises:
        DatabaseError: the database is down, refuses the connection, or is not migrated.
    """
    async with database_url(settings.database, settings.home) as url:
        address, status = await _look(parse_url(url))
        check_not_newer(status.revision)
        if status.revision != HEAD:
            if not migrate and settings.database.url is not None:
                raise DatabaseVersionError(
                    f"the database {address.place} is at version {status.revision or 'none'},"
                    f" not {HEAD}: run `babylon db migrate`"
                )
            await run_migrations(address)
            address, status = await _look(address)
        with _working(address):
            async with (
                open_pool(address) as pool,
                _game_pool(settings.database, pool, game_may_be_away) as (game, apart, away),
            ):
                ours = bool(status.game_tables_ours)
                if away:  # the game's tables are taken to be in order, and only to be read
                    yield Store(
                        home=settings.home,
                        pool=pool,
                        game=game,
                        game_tables_ours=ours,  # those beside our schema are there to be written
                        has_game_tables=True,
                        game_problem="",
                        records=False,
                    )
                else:
                    yield await _store(settings.home, pool, (game, apart), ours, address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """Facts about its database with which a store starts while that is away."""

    game_tables_ours: bool
    has_game_tables: bool
    game_problem: str
    records: bool

    @classmethod
    def of(cls, store: Store) -> "Remembered":
        return cls(**{field.name: getattr(store, field.name) for field in fields(cls)})


@asynccontextmanager
async def store_when_back(
    database: DatabaseSettings, home: Home, known: Remembered
) -> AsyncIterator[Store]:
    """Open a store whose database is away: each use tries to connect.

    It keeps to what works behind a pooler, because nobody can tell now if there is one.
    """
    assert database.url is not None
    address = replace(parse_url(database.url.get_secret_value()), pooled=True)
    async with open_pool(address) as pool:
        yield Store(home=home, pool=pool, game=pool, **asdict(known))


@asynccontextmanager
async def game_snapshot(store: Store) -> AsyncIterator[tuple[Connection, Connection]]:
    """Open two read-only connections that share one snapshot of the game's database."""
    async with (
        store.game.acquire() as first,
        first.transaction(isolation="repeatable_read", readonly=True),
        store.game.acquire() as second,
        second.transaction(isolation="repeatable_read", readonly=True),
    ):
        snapshot = await first.fetchval("SELECT pg_export_snapshot()")
        await second.execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
        yield first, second


async def database_status(database: DatabaseSettings, home: Home) -> DatabaseStatus:
    """Read the status of a database without changing it, migrated or not."""
    async with database_url(database, home) as url:
        return (await _look(parse_url(url)))[1]


def require_game_tables(store: Store) -> None:
    """Check that play can be collected.

    Raises:
        DatabaseError: the database has no game tables, or they lack what is read from them.
    """
    if store.game_problem:
        raise DatabaseError(store.game_problem)


def require_recordable(store: Store) -> None:
    """Check that play can be recorded where it is collected.

    Raises:
        DatabaseError: the game's tables are missing, incomplete, or in a database that is only
            read.
    """
    require_game_tables(store)
    if not store.records:
        raise DatabaseError(
            "play is collected from GAME_DATABASE_URL, which is only read: record it with"
            " DATABASE_URL set to the game's database, and GAME_DATABASE_URL unset"
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


async def _look(address: Address) -> tuple[Address, DatabaseStatus]:
    """Return the address, now knowing about a pooler, and the status of its database."""
    with _working(address):
        async with first_session(address) as (session, address):
            revision = await current_revision(session)
            ours: bool | None = None
            if revision is not None:
                ours = await session.fetchval("SELECT ours FROM babylon.database")
            return address, DatabaseStatus(
                place=address.place,
                revision=revision,
                head=HEAD,
                game_tables_ours=ours,
                has_game_tables=await tables_present(session, address.schema),
                pooled=address.pooled,
            )


@asynccontextmanager
async def _game_pool(
    database: DatabaseSettings, pool: Pool, may_be_away: bool
) -> AsyncIterator[tuple[Pool, Address | None, bool]]:
    """Open the pool for reads of the game's tables; our own without a GAME_DATABASE_URL.

    The last value is true while that database is away.
    """
    if database.game_url is None:
        yield pool, None, False
        return
    address = parse_url(database.game_url.get_secret_value(), variable="GAME_DATABASE_URL")
    away = False
    with _working(address):
        try:
            async with first_session(address) as (_, address):
                pass
        except UNREACHABLE as error:
            if not may_be_away:
                raise
            log.warning("play is not read now: %s", one_line(error) or type(error).__name__)
            # Nobody can tell now if a pooler is in between.
            address, away = replace(address, pooled=True), True
        async with open_pool(address) as game:
            yield game, address, away


async def _store(
    home: Home, pool: Pool, opened: tuple[Pool, Address | None], ours: bool, address: Address
) -> Store:
    game, apart = opened
    async with game.acquire() as reading:
        schema = (apart or address).schema
        present = await tables_present(reading, schema)
        problem = await game_problem(reading, schema, apart is not None)
        same = True
        if apart is not None:
            async with pool.acquire() as own:
                same = await is_same_database(own, reading)
    return Store(
        home=home,
        pool=pool,
        game=game,
        game_tables_ours=ours and same,
        has_game_tables=present,
        game_problem=problem,
        records=same,
    )


@contextmanager
def _working(address: Address) -> Iterator[None]:
    """Turn errors that only the database's operator can repair into one line.

    Other errors pass unchanged: they are bugs.
    """
    try:
        yield
    except asyncpg.InsufficientPrivilegeError as error:
        raise DatabaseError(
            f"the account lacks a right in the database at {address.place} ({one_line(error)}):"
            f" GRANT it, or use another account in {address.variable}"
        ) from error
    except _OPERATOR as error:
        raise DatabaseError(
            f"the database at {address.place} gave up ({one_line(error)}): see its log, then run"
            " this again"
        ) from error


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


@asynccontextmanager
async def unlimited(store: Store) -> AsyncIterator[Connection]:
    """A transaction for a lock that may be held, and waited for, as long as its work takes.

    It holds no snapshot, so it delays no vacuum. A pooler in transaction mode keeps it too.
    """
    async with store.pool.acquire() as connection, connection.transaction():
        await connection.execute(
            "SET LOCAL idle_in_transaction_session_timeout = 0; SET LOCAL statement_timeout = 0"
        )
        yield connection


async def read_clock(store: Store) -> Clock:
    """Read the clock on a connection of its own, with the writers of the game's database."""
    async with store.pool.acquire() as connection:
        clock = await clock_of(connection)
    if store.game is store.pool or store.records:  # a replica's writers are in its primary
        return clock
    async with store.game.acquire() as connection:
        game = await clock_of(connection)
    writers = [one.oldest_writer for one in (clock, game) if one.oldest_writer is not None]
    return replace(
        clock, oldest_writer=min(writers, default=None), hidden=clock.hidden + game.hidden
    )


async def read_now(store: Store) -> datetime:
    """Read the time of our own database, also while the game's is away."""
    now: datetime = await store.pool.fetchval("SELECT clock_timestamp()")
    return now


async def clock_of(connection: Connection) -> Clock:
    """Read the clock on this connection; inside a transaction too it is the present time."""
    row = await connection.fetchrow(_CLOCK)
    assert row is not None
    return Clock(**row)
