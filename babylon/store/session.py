"""Connections that survive poolers and silent servers.

A pooler such as PgBouncer may give each transaction another session of the server. Behind one,
every statement therefore runs in a transaction that first sets what it needs, and no statement is
prepared under a name. Cursors are those of SQL, which end with their transaction.

A server that falls silent (a halted pooler, a link that loses all packets) neither answers nor
breaks the connection. A query that gets no answer in time is cancelled, and a connection whose
cancellation is not answered either is closed, so that nothing waits for it.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

import asyncpg
import msgspec
from asyncpg.pool import PoolConnectionProxy
from asyncpg.transaction import Transaction

from babylon.core.errors import DatabaseError
from babylon.store.address import Address

if TYPE_CHECKING:  # generic in asyncpg's stubs only
    _Base = asyncpg.Connection[asyncpg.Record]
    _BasePool = asyncpg.Pool[asyncpg.Record]
else:
    _Base, _BasePool = asyncpg.Connection, asyncpg.Pool

M = TypeVar("M", bound=Callable[..., Awaitable[Any]])
Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"
Connection: TypeAlias = "PoolConnectionProxy[asyncpg.Record]"
Isolation = Literal["read_committed", "read_uncommitted", "serializable", "repeatable_read"]

CANCEL_S = 1.0  # a server answers a cancellation after two round trips
CLOSE_S = 2.0
_WEEK_S = 7 * 24 * 3600.0
_LOST = (OSError, asyncpg.InterfaceError, asyncpg.InternalClientError, asyncpg.PostgresError)


def one_line(error: BaseException) -> str:
    """Postgres' message, detail and hint on one line."""
    return " ".join(str(error).split())


def _limited(method: M) -> M:
    """Run a method of ``Session`` within its time limit, behind a pooler in a transaction."""

    @wraps(method)
    async def call(session: "Session", *args: object, **options: object) -> object:
        async with session.statement():
            return await method(session, *args, **options)

    return cast(M, call)


class Session(_Base):
    """A connection of a pool. ``preamble``: begins every transaction behind a pooler."""

    preamble = ""
    place = ""
    _begins = False
    _answers = 0

    @asynccontextmanager
    async def statement(self) -> AsyncIterator[None]:
        """Run one statement."""
        if self.preamble and not self._begins and not self.is_in_transaction():
            async with self.transaction(), self.statement():
                yield
            return
        try:
            yield
        except asyncio.CancelledError:
            self._close_unless_answered()
            raise
        except TimeoutError as error:
            self._close_unless_answered()
            raise DatabaseError(
                f"the database at {self.place} gave no answer in time: see its load, or raise the"
                " limit in its URL (socket_timeout=SECONDS)"
            ) from error
        except RuntimeError as error:
            if not self.is_closed():
                raise
            # uvloop refuses a write to a socket that just closed, which COPY does
            self.terminate()
            raise DatabaseError(
                f"the connection to the database at {self.place} broke during a statement:"
                " try again"
            ) from error
        self._answers += 1

    def _close_unless_answered(self) -> None:
        """Close the connection soon, unless it answers a ROLLBACK or a query by then."""
        answers = self._answers

        def close() -> None:
            if self._answers == answers:
                self.terminate()

        asyncio.get_running_loop().call_later(CANCEL_S, close)

    def transaction(
        self,
        *,
        isolation: Isolation | None = None,
        readonly: bool = False,
        deferrable: bool = False,
    ) -> Transaction:
        return _Transaction(self, isolation, readonly, deferrable)

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Let the next statement begin a transaction."""
        self._begins = not self.is_in_transaction()
        try:
            yield
        finally:
            self._begins = False

    async def execute(self, query: str, *args: object, timeout: float | None = None) -> str:
        async with self.statement():
            begin = query + self.preamble if self._begins else query
            return await super().execute(begin, *args, timeout=timeout)

    fetch = _limited(_Base.fetch)
    fetchrow = _limited(_Base.fetchrow)
    fetchval = _limited(_Base.fetchval)
    executemany = _limited(_Base.executemany)
    copy_records_to_table = _limited(_Base.copy_records_to_table)
    copy_to_table = _limited(_Base.copy_to_table)
    copy_from_table = _limited(_Base.copy_from_table)

    async def execute_alone(self, query: str) -> str:
        """Execute a statement that may be in no transaction, without a time limit."""
        return await super().execute(query, timeout=_WEEK_S)

    async def add_listener(self, channel: str, callback: Any) -> None:
        """Listen to a channel. Behind a pooler this does nothing: notifications get lost there."""
        if not self.preamble:
            await super().add_listener(channel, callback)

    def get_reset_query(self) -> str:
        """Return nothing behind a pooler: it would reset another transaction's session."""
        return "" if self.preamble else super().get_reset_query()


class _Transaction(Transaction):
    """Begins with the session's preamble. A lost connection does not hide the body's error."""

    def __init__(self, session: Session, *options: Any) -> None:
        super().__init__(session, *options)
        self._session = session

    async def start(self) -> None:
        with self._session.beginning():
            await super().start()

    async def __aexit__(self, extype: object, ex: object, tb: object) -> None:
        try:
            await super().__aexit__(extype, ex, tb)
        except (*_LOST, DatabaseError):
            if ex is None:  # the commit failed
                raise


async def connect(address: Address) -> Session:
    """Open one connection, to the first of the hosts that answers in time.

    Raises:
        DatabaseError: no host answers, or one refuses the account.
    """
    problems: list[Exception] = []
    for host, port, kind in address.attempts():
        try:
            session = await asyncpg.connect(
                **address.arguments(host, port, kind), connection_class=Session
            )
        except (asyncpg.CannotConnectNowError, asyncpg.TargetServerAttributeNotMatched) as error:
            # it starts or stops, or is a standby
            problems.append(error)
        except (asyncpg.PostgresError, asyncpg.InterfaceError, ssl.SSLError) as error:
            raise DatabaseError(
                f"the database at {address.place} refuses the connection ({one_line(error)}):"
                f" correct {address.variable}"
            ) from error
        except OSError as error:  # refused, unknown, timed out
            problems.append(error)
        else:
            assert isinstance(session, Session)
            return await _prepared(session, address)
    reasons = "; ".join(
        dict.fromkeys(one_line(error) or type(error).__name__ for error in problems)
    )
    raise DatabaseError(
        f"no database answers at {address.place} ({reasons}): start it,"
        f" or correct {address.variable}"
    ) from problems[-1]


async def _prepared(session: Session, address: Address) -> Session:
    session.place = address.place
    await session.set_type_codec(
        "jsonb",
        schema="pg_catalog",
        encoder=lambda value: msgspec.json.encode(value).decode(),
        decoder=msgspec.json.decode,
    )
    if address.pooled:
        session.preamble = address.preamble
    return session


async def is_pooled(session: "Session | Connection") -> bool:
    """Return True if a pooler answers in the server's place: it has its own process id."""
    process: int = await session.fetchval("SELECT pg_backend_pid()")
    return process != session.get_server_pid()


@asynccontextmanager
async def first_session(address: Address) -> AsyncIterator[tuple[Session, Address]]:
    """Open a session that works behind a pooler too; the address then knows if there is one."""
    session = await connect(replace(address, pooled=True))
    try:
        pooled = address.pooled or await is_pooled(session)
        yield session, replace(address, pooled=pooled)
        await session.close(timeout=CLOSE_S)
    finally:
        session.terminate()


class _Pool(_BasePool):
    """A pool whose users do not see that a connection broke after their work was done.

    The pool has closed such a connection by itself. Its error would take the place of the body's
    own one, and that of a cancellation: a loop that retries after errors would then go on for ever.
    """

    async def release(self, connection: Any, *, timeout: float | None = None) -> None:
        with suppress(*_LOST, DatabaseError):
            await super().release(connection, timeout=timeout)


@asynccontextmanager
async def open_pool(address: Address) -> AsyncIterator[Pool]:
    """Open a pool of connections; the first use opens the first one."""

    async def again(*_: object, **__: object) -> Session:
        return await connect(address)

    pool = _Pool(
        min_size=0,
        max_size=address.connections,
        max_queries=50_000,
        max_inactive_connection_lifetime=300.0,
        connect=again,
        setup=None,
        init=None,
        reset=None,
        loop=None,
        connection_class=Session,
        record_class=asyncpg.Record,
    )
    try:
        yield await pool
    finally:
        await _close(pool)


async def _close(pool: Pool) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await pool.close()
    except TimeoutError:  # a query still runs, or a connection was never released
        pool.terminate()


async def in_batches(
    connection: Connection, query: str, *args: object, size: int
) -> AsyncIterator[list[asyncpg.Record]]:
    """Yield the rows of a query in lists of ``size``, inside the caller's transaction.

    This is a cursor of SQL: asyncpg's own prepares a statement under a name, which collides behind
    a pooler.
    """
    await connection.execute(f"DECLARE rows NO SCROLL CURSOR FOR {query}", *args)
    while rows := await connection.fetch(f"FETCH {size} FROM rows"):
        yield rows
    await connection.execute("CLOSE rows")
