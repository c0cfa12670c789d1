"""``babylon db import``: the game's own rows, as JSON lines, into the game's tables.

A file's table follows from its name or from the keys of its first row. Postgres itself converts
each value to the column's type. Rows that are there already stay as they are.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import msgspec

from babylon.errors import DatabaseError
from babylon.store.connection import Store, affected, one_line

if TYPE_CHECKING:
    from babylon.store.connection import Connection

# In the order in which they refer to each other.
TABLES = (
    "User",
    "trajectories",
    "llm_call_logs",
    "market_outcomes",
    "training_batches",
    "trained_models",
    "reward_judgments",
)
_FILE_NAMES = {"users": "User", **{table.lower(): table for table in TABLES}}

Columns = dict[str, frozenset[str]]  # of each table


class ImportFileError(DatabaseError):
    """A file that cannot be imported; nothing of the whole import was written."""


@dataclass(frozen=True, slots=True)
class _Line:
    place: str  # file:line
    row: dict[str, Any]


async def import_files(store: Store, paths: Iterable[Path]) -> dict[str, int]:
    """Import all files in one transaction; returns the number of new rows by table.

    Raises:
        DatabaseError: the database is somebody else's, or a line cannot be imported (the message
            names file, line and reason). Nothing was written then.
    """
    if not store.game_tables_ours:
        raise DatabaseError(
            "this database is the game's own: its rows are there already, and nothing is imported"
            " into it; unset DATABASE_URL to import into the embedded database"
        )
    async with store.pool.acquire() as connection, connection.transaction():
        columns = await _columns(connection)
        files = [(_table_of(path, columns), path) for path in paths]
        files.sort(key=lambda file: TABLES.index(file[0]))
        added = {table: 0 for table, _ in files}
        for table, path in files:
            for line in _lines(path):
                added[table] += await _insert(connection, table, line, columns[table])
        return added


async def _columns(connection: "Connection") -> Columns:
    rows = await connection.fetch(
        "SELECT table_name, array_agg(column_name::text) AS names FROM information_schema.columns"
        " WHERE table_schema = current_schema() AND table_name = ANY($1::text[]) GROUP BY 1",
        list(TABLES),
    )
    return {row["table_name"]: frozenset(row["names"]) for row in rows}


def _table_of(path: Path, columns: Columns) -> str:
    """By file name, else the one table that has all keys of the first row."""
    if table := _FILE_NAMES.get(path.stem.lower()):
        return table
    first = next(_lines(path), None)
    if first is None:
        raise ImportFileError(f"{path} is empty and its name is no table's: {', '.join(TABLES)}")
    fitting = [table for table in TABLES if first.row.keys() <= columns[table]]
    if len(fitting) != 1:
        raise ImportFileError(
            f"{first.place}: the keys {', '.join(first.row)} fit {len(fitting)} tables: name the"
            f" file after its table ({', '.join(sorted(_FILE_NAMES))})"
        )
    return fitting[0]


def _lines(path: Path) -> Iterator[_Line]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise ImportFileError(f"cannot read {path}: {error.strerror}") from error
    with file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                yield _Line(f"{path}:{number}", msgspec.json.decode(text, type=dict[str, Any]))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ImportFileError(f"{path}:{number}: not a JSON object: {error}") from error


async def _insert(
    connection: "Connection", table: str, line: _Line, columns: frozenset[str]
) -> int:
    """One row; a key that the row lacks gets the column's default."""
    if unknown := line.row.keys() - columns:
        raise ImportFileError(
            f"{line.place}: table {table} has no column {', '.join(sorted(unknown))}"
        )
    if not line.row:
        raise ImportFileError(f"{line.place}: the object has no keys")
    names = ", ".join(f'"{name}"' for name in line.row)
    try:
        status = await connection.execute(
            f'INSERT INTO "{table}" ({names}) SELECT {names}'
            f' FROM jsonb_populate_record(NULL::"{table}", $1) ON CONFLICT DO NOTHING',
            line.row,
        )
    except asyncpg.PostgresError as error:
        reason, _, _ = one_line(error).partition(" DETAIL: Failing row")  # the line says where
        raise ImportFileError(f"{line.place}: {reason}") from error
    return affected(status)
