"""Brings a database to the newest version; the versions are in the package ``migrations``."""

import asyncio
from pathlib import Path
from typing import Any

import asyncpg

from babylon import migrations
from babylon.core.errors import DatabaseError

HEAD = max(file.name[:4] for file in (Path(migrations.__file__).parent / "versions").glob("0*.py"))

_ALEMBIC = asyncio.Lock()  # it keeps what it works on in module globals


async def current_revision(connection: Any) -> str | None:
    """The version that the database is at, ``None`` before the first migration."""
    if await connection.fetchval("SELECT to_regclass('babylon.alembic_version')") is None:
        return None
    revision: str | None = await connection.fetchval(
        "SELECT version_num FROM babylon.alembic_version"
    )
    return revision


def check_not_newer(revision: str | None) -> None:
    """A database that a newer program has migrated must not be touched by an older one."""
    if revision is not None and revision > HEAD:
        raise DatabaseError(
            f"the database is at version {revision}, this program knows versions up to {HEAD}:"
            " install a newer babylon-rl"
        )


async def migrate(arguments: dict[str, Any], revision: str = "head") -> None:
    """Run what is missing, all in one transaction; concurrent callers wait for each other.

    ``arguments`` are those of ``asyncpg.connect``.

    Raises:
        DatabaseError: the account may not create our schema; nothing was changed.
    """
    # imported here: SQLAlchemy and Alembic cost half a second that only a migration needs
    from alembic import command
    from alembic.config import Config
    from sqlalchemy import Connection
    from sqlalchemy.exc import ProgrammingError
    from sqlalchemy.ext.asyncio import create_async_engine
    from sqlalchemy.pool import NullPool

    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))

    def upgrade(connection: Connection) -> None:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)

    async def connect() -> Any:
        return await asyncpg.connect(**arguments)

    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=NullPool)
    try:
        async with _ALEMBIC, engine.begin() as connection:
            await connection.run_sync(upgrade)
    except (asyncpg.InsufficientPrivilegeError, ProgrammingError) as error:
        cause: Any = getattr(error, "orig", error)
        if cause.sqlstate != asyncpg.InsufficientPrivilegeError.sqlstate:
            raise
        raise DatabaseError(
            f"the database account may not create schema babylon ({cause.__cause__ or cause}):"
            " GRANT CREATE ON DATABASE ... to it (in an empty database ON SCHEMA public too),"
            " then run `babylon db migrate`"
        ) from error
    finally:
        await engine.dispose()
