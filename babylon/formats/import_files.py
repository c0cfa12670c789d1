"""``babylon db import``: the game's own rows, or traces of other systems, into the game's tables.

A file of the game's rows holds one table. The file's name or the keys of its first row identify the
table, and Postgres converts each value to the column's type. A trace becomes a trajectory with its
call log, and recorded calls if its tokens are known. Existing rows stay unchanged.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import asyncpg

from babylon.core.errors import DatabaseError
from babylon.core.text import storable
from babylon.core.windows import Window
from babylon.formats.atif import read_atif
from babylon.formats.chat_lines import read_chats
from babylon.formats.format_names import Format
from babylon.formats.spans import read_span_traces
from babylon.formats.trace import Document, ImportFileError, Trace, read_documents
from babylon.formats.trace_rows import TraceRows, trace_rows
from babylon.recorder.trajectory import Row
from babylon.store.connection import Connection, Store, affected, one_line

DEFAULT_AGENT = "imported"


def guess_format(path: Path) -> Format | None:
    """Guess a file's format from its name, else from the keys of its first object.

    ``None`` stands for spans; their attributes give the dialect.

    Raises:
        ImportFileError: the file cannot be read.
    """
    if path.stem.lower() in _FILE_NAMES:
        return Format.GAME
    first = next(iter(read_documents(path)), None)
    keys = first.value.keys() if first else set()
    if "resourceSpans" in keys:
        return None
    if "schema_version" in keys and "steps" in keys:
        return Format.ATIF
    if isinstance(first and first.value.get("messages"), list):
        return Format.CHAT
    return Format.GAME


def read_traces(
    path: Path, format: Format | None, agent_id: str = DEFAULT_AGENT
) -> Iterator[Trace]:
    """Yield the traces of one file of any format except the game's.

    Raises:
        ImportFileError: a line cannot be read. The message names it.
    """
    documents: Iterable[Document] = read_documents(path)
    match format:
        case Format.ATIF:
            for document in documents:
                yield from read_atif(document)
        case Format.CHAT:
            yield from read_chats(documents, agent_id)
        case Format.OTEL:
            yield from read_span_traces(documents, agent_id, "otel")
        case Format.OPENINFERENCE:
            yield from read_span_traces(documents, agent_id, "openinference")
        case None:
            yield from read_span_traces(documents, agent_id)
        case Format.GAME:
            raise ImportFileError(f"{path}: a file of the game's rows holds no traces")


# In the order of their foreign keys.
TABLES = (
    "User",
    "trajectories",
    "llm_call_logs",
    "market_outcomes",
    "training_batches",
    "trained_models",
    "reward_judgments",
    "babylon.calls",
)
_FILE_NAMES = {
    "users": "User",
    "calls": "babylon.calls",
    **{table.lower(): table for table in TABLES},
}

Columns = dict[str, frozenset[str]]  # table → names of its columns
Source = tuple[Path, Format | None]


async def import_files(
    store: Store,
    paths: Iterable[Path],
    *,
    format: Format | None = None,
    window: Window | None = None,
    agent_id: str = DEFAULT_AGENT,
    minutes: int = 60,
) -> dict[str, int]:
    """Import all files in one transaction, and return the number of new rows by table.

    ``format`` applies to every file; by default each file's format is guessed. ``window`` and
    ``agent_id`` apply to traces that name none. ``minutes`` is the length of windows.

    Raises:
        DatabaseError: the database is the game's own, or a line cannot be imported (the message
            names file, line and reason). Nothing is written then.
    """
    if not store.game_tables_ours:
        raise DatabaseError(
            "nothing is imported into the game's own database: unset DATABASE_URL to import into"
            " the embedded database"
        )
    sources = [(path, format or guess_format(path)) for path in paths]
    now = datetime.now(UTC)
    async with store.pool.acquire() as connection, connection.transaction():
        columns = await _columns(connection)
        added = await _import_game(connection, columns, sources)
        for path, kind in sources:
            if kind is not Format.GAME:
                for trace in read_traces(path, kind, agent_id):
                    rows = trace_rows(trace, minutes=minutes, window=window, now=now)
                    await _insert_trace(connection, columns, trace.place, rows, added)
        return added


async def _import_game(
    connection: Connection, columns: Columns, sources: list[Source]
) -> dict[str, int]:
    game = [path for path, format in sources if format is Format.GAME]
    files = sorted(
        ((_table_of(path, columns), path) for path in game), key=lambda f: TABLES.index(f[0])
    )
    added = {table: 0 for table, _ in files}
    for table, path in files:
        for line in read_documents(path):
            added[table] += await _insert(connection, table, line, columns[table])
    return added


async def _insert_trace(
    connection: Connection, columns: Columns, place: str, rows: TraceRows, added: dict[str, int]
) -> None:
    agent = rows.trajectory["agentId"]
    tables: dict[str, list[Row]] = {
        "User": [{"id": agent, "username": agent, "displayName": agent, "isAgent": True}],
        "trajectories": [rows.trajectory],
        "llm_call_logs": rows.logs,
        "babylon.calls": [asdict(call) for call in rows.calls],
    }
    for table, values in tables.items():
        for value in values:
            line = Document(
                place, {n: storable(v) if isinstance(v, str) else v for n, v in value.items()}
            )
            new = await _insert(connection, table, line, columns[table])
            added[table] = added.get(table, 0) + new


async def _columns(connection: Connection) -> Columns:
    rows = await connection.fetch(
        "SELECT CASE table_schema WHEN 'babylon' THEN 'babylon.' ELSE '' END || table_name AS name,"
        " array_agg(column_name::text) AS names FROM information_schema.columns"
        " WHERE table_schema IN (current_schema(), 'babylon') GROUP BY 1"
    )
    return {row["name"]: frozenset(row["names"]) for row in rows if row["name"] in TABLES}


def _table_of(path: Path, columns: Columns) -> str:
    """Return the table by file name, else the only table that has all keys of the first row."""
    if table := _FILE_NAMES.get(path.stem.lower()):
        return table
    first = next(iter(read_documents(path)), None)
    if first is None:
        raise ImportFileError(
            f"{path} is empty, and its name is not one of {', '.join(sorted(_FILE_NAMES))}"
        )
    fitting = [table for table in TABLES if first.value.keys() <= columns[table]]
    if len(fitting) != 1:
        raise ImportFileError(
            f"{first.place}: the keys {', '.join(first.value)} fit {len(fitting)} tables: name the"
            f" file after its table ({', '.join(sorted(_FILE_NAMES))}), or pass --format"
        )
    return fitting[0]


async def _insert(
    connection: Connection, table: str, line: Document, columns: frozenset[str]
) -> int:
    """Insert one row; return 1, or 0 if it exists. Absent keys get the column's default."""
    row = line.value
    if unknown := row.keys() - columns:
        raise ImportFileError(
            f"{line.place}: table {table} has no column {', '.join(sorted(unknown))}"
        )
    if not row:
        raise ImportFileError(f"{line.place}: the object has no keys")
    names = ", ".join(f'"{name}"' for name in row)
    place = ".".join(f'"{part}"' for part in table.split("."))
    try:
        status = await connection.execute(
            f"INSERT INTO {place} ({names}) SELECT {names}"
            f" FROM jsonb_populate_record(NULL::{place}, $1) ON CONFLICT DO NOTHING",
            row,
        )
    except asyncpg.PostgresError as error:
        reason, _, _ = one_line(error).partition(" DETAIL: Failing row")  # the row may be long
        raise ImportFileError(f"{line.place}: {reason}") from error
    return affected(status)
