"""Versions of the database: append-only Alembic revisions, each of which runs raw SQL files.

``babylon db migrate`` runs them, through ``babylon.store.migrate``.
"""

from pathlib import Path
from typing import Any

from alembic import op
from sqlalchemy import text

VERSIONS = Path(__file__).parent / "versions"


def run_file(name: str) -> None:
    """Execute a file of SQL statements in the migration's transaction."""
    script = (VERSIONS / name).read_text(encoding="utf-8")
    connection: Any = op.get_bind().connection.dbapi_connection
    connection.run_async(lambda raw: raw.execute(script))


def database_is_ours() -> bool:
    """Return whether the game's tables are ours to create and alter (see 0001_ownership.sql)."""
    return bool(op.get_bind().execute(text("SELECT ours FROM babylon.database")).scalar_one())
