"""Migration of a database to the newest version in the package ``babylon.migrations``.

A running system survives it: each version is a transaction of its own, and no statement waits
longer than ``LOCK_S`` for a lock. While it waits, Postgres makes every later query of that table
wait too, inserts included. A version that does not get its locks is rolled back and tried again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg

from babylon import migrations
from babylon.core.errors import DatabaseError, DatabaseVersionError
from babylon.store.address import Address
from babylon.store.session import Session, connect

log = logging.getLogger(__name__)
_SCRIPTS = Path(migrations.__file__).parent
HEAD = max(file.name[:4] for file in (_SCRIPTS / "versions").glob("0*.py"))
LOCK_S = 0.3
PATIENCE_S = 600.0
"""Seconds in which a version is tried again: longer than the collection of any window."""

_ALEMBIC = asyncio.Lock()  # Alembic keeps the current migration in module globals
_ADVISORY_LOCK = 0x6261_6279_6C6F_6E  # "babylon"
_POLL_S = 0.1
_LONGEST_PAUSE_S = 5.0
_LOCKED = (asyncpg.LockNotAvailableError.sqlstate, asyncpg.DeadlockDetectedError.sqlstate)
_DENIED = asyncpg.InsufficientPrivilegeError.sqlstate


async def current_revision(connection: Any) -> str | None:
    """Return the version of the database, ``None`` before the first migration."""
    if await connection.fetchval("SELECT to_regclass('babylon.alembic_version')") is None:
        return None
    revision: str | None = await connection.fetchval(
        "SELECT version_num FROM babylon.alembic_version"
    )
    return revision


def check_not_newer(revision: str | None) -> None:
    """
    Raises:
        DatabaseVersionError: a newer program migrated the database; this one must not write to it.
    """
    if revision is not None and revision > HEAD:
        raise DatabaseVersionError(
            f"the database is at version {revision}, this program knows versions up to {HEAD}:"
            " install a newer babylon-rl"
        )


async def migrate(address: Address, revision: str = "head") -> None:
    """Run the missing versions, each in a transaction. Concurrent callers wait for each other.

    Raises:
        DatabaseError: the account may not create schema babylon, or another session keeps its
            locks; the versions that were completed stay.
    """
    # Imported here because SQLAlchemy and Alembic take half a second, and only migrations need it.
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    # The session's preamble sets the limit in each transaction, behind a pooler too.
    address = replace(address, pooled=True, query_s=None)
    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS))
    scripts = ScriptDirectory.from_config(config)
    async with _ALEMBIC, _turn(address) as present:
        missing = list(scripts.iterate_revisions(revision, present or "base"))
        for script in reversed(missing):
            await _until_unlocked(address, config, script.revision)


@asynccontextmanager
async def _turn(address: Address) -> AsyncIterator[str | None]:
    """Hold the advisory lock in a transaction of its own; yield the database's version.

    A pooler keeps a transaction together, not a session. An index that is built concurrently waits
    for every query and open result. So nobody waits for the lock inside a query, and the last
    statement is one without a result.
    """
    session = await connect(address)
    try:
        while True:
            async with session.transaction():
                if await session.fetchval("SELECT pg_try_advisory_xact_lock($1)", _ADVISORY_LOCK):
                    revision = await current_revision(session)
                    await session.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
                    yield revision
                    return
            await asyncio.sleep(_POLL_S)
    finally:
        session.terminate()


async def _until_unlocked(address: Address, config: Any, revision: str) -> None:
    """Upgrade to one version; try again while other sessions hold locks."""
    from sqlalchemy.exc import DBAPIError

    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    pause = LOCK_S
    while True:
        try:
            return await _upgrade(address, config, revision)
        except (asyncpg.PostgresError, DBAPIError) as error:
            cause: Any = getattr(error, "orig", error)
            if cause.sqlstate == _DENIED:
                raise DatabaseError(
                    "the database account may not create schema babylon"
                    f" ({cause.__cause__ or cause}): GRANT CREATE ON DATABASE ... to it (in an"
                    " empty database ON SCHEMA public too), then run `babylon db migrate`"
                ) from error
            if cause.sqlstate not in _LOCKED:
                raise
            if asyncio.get_running_loop().time() > deadline:
                raise DatabaseError(
                    f"version {revision} of the database did not get its locks for"
                    f" {PATIENCE_S:g} s, because other sessions read or write: end the long ones"
                    " (SELECT pid, xact_start, query FROM pg_stat_activity ORDER BY xact_start),"
                    " then run `babylon db migrate` again"
                ) from error
        log.info("version %s waits for other sessions; again in %.1f s", revision, pause)
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


async def _upgrade(address: Address, config: Any, revision: str) -> None:
    from alembic import command
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import create_async_engine
    from sqlalchemy.pool import NullPool

    def upgrade(connection: Connection) -> None:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)

    async def session() -> Session:
        opened = await connect(address)
        opened.preamble += f"SET LOCAL lock_timeout TO '{LOCK_S * 1000:.0f}ms';"
        return opened

    engine = create_async_engine(
        "postgresql+asyncpg://",
        async_creator=session,
        poolclass=NullPool,
        connect_args={"prepared_statement_cache_size": 0},
    )
    try:
        async with engine.connect() as connection:
            await connection.run_sync(upgrade)
            await connection.commit()
    finally:
        await engine.dispose()
