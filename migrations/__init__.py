"""Versions of the database: append-only Alembic revisions, each of which runs raw SQL files.

``babylon db migrate`` runs them, through ``babylon.store.migrate``, while older programs go on.
A version therefore only adds: a table, an index, a column that may be NULL or has a constant
default. What older programs use is removed in the release after the one that no longer uses it.
The exception is 0004, which rewrites references: workers stop before it.

Every program imports this package for the newest version, so the functions import Alembic and
SQLAlchemy, which take half a second.
"""

from pathlib import Path
from typing import Any

VERSIONS = Path(__file__).parent / "versions"


def run_file(name: str) -> None:
    """Execute a file of SQL statements in the migration's transaction."""
    from alembic import op
    from sqlalchemy import text

    script = (VERSIONS / name).read_text(encoding="utf-8")
    op.get_bind().execute(text("SELECT 1"))  # begins the transaction, unless it is begun
    connection: Any = op.get_bind().connection.dbapi_connection
    connection.run_async(lambda raw: raw.execute(script))


def run_concurrently(name: str) -> None:
    """Execute the statements of a file one by one, outside transactions, without a limit for locks.

    This is for CREATE INDEX CONCURRENTLY, which waits for readers and lets writers pass. The
    version runs again after a failure, so each statement must be repeatable: first DROP INDEX
    CONCURRENTLY IF EXISTS. A version that calls this does nothing else.
    """
    from alembic import op

    script = (VERSIONS / name).read_text(encoding="utf-8")
    with op.get_context().autocommit_block():
        connection: Any = op.get_bind().connection.dbapi_connection
        for statement in filter(str.strip, script.split(";\n")):
            connection.run_async(lambda raw, one=statement: raw.execute_alone(one))


def database_is_ours() -> bool:
    """Return whether the game's tables are ours to create and alter (see 0001_ownership.sql)."""
    from alembic import op
    from sqlalchemy import text

    return bool(op.get_bind().execute(text("SELECT ours FROM babylon.database")).scalar_one())
