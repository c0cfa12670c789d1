"""Migration of a database to the newest version in the package ``babylon.migrations``."""

import asyncio
from pathlib import Path
from typing import Any

import asyncpg

from babylon import migrations
from babylon.core.errors import DatabaseError

HEAD = max(file.name[:4] for file in (Path(migrations.__file__).parent / "versions").glob("0*.py"))

_ALEMBIC = asyncio.Lock()  # Alembic keeps the current migration in module globals


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
        DatabaseError: a newer program migrated the database; this one must not write to it.
    """
    if revision is not None and revision > HEAD:
        raise DatabaseError(
            f"the database is at version {revision}, this program knows versions up to {HEAD}:"
            " install a newer babylon-rl"
        )


async def migrate(arguments: dict[str, Any], revision: str = "head") -> None:
    """Run the missing migrations in one transaction. Concurrent callers wait for each other.

    ``arguments`` go to ``asyncpg.connect``.

    Raises:
        DatabaseError: the account may not create schema babylon; nothing was changed.
    """
    # Imported here because SQLAlchemy and Alembic take half a second, and only migrations need it.
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
