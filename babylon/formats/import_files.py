"""``babylon db import``: the game's own rows, or traces of other systems, into the game's tables.

A file of the game's rows holds one table. The file's name or the keys of its first row identify the
table, and Postgres converts each value to the column's type. A trace becomes a trajectory with its
call log, and recorded calls if its tokens are known. Existing rows stay unchanged.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from babylon.core.errors import DatabaseError
from babylon.core.text import storable
from babylon.core.windows import Window
from babylon.formats.atif import read_atif
from babylon.formats.chat_lines import read_chats
from babylon.formats.format_names import Format
from babylon.formats.spans import read_span_traces
from babylon.formats.staging import (
    TABLES,
    Columns,
    FilePlace,
    Staging,
    chunks_of,
    drop_abandoned,
)
from babylon.formats.trace import Document, ImportFileError, Trace, read_documents
from babylon.formats.trace_rows import TraceRows, trace_rows
from babylon.recorder.trajectory import Row
from babylon.store.connection import Store

DEFAULT_AGENT = "imported"
_TRACES = 100  # staged at a time


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


_FILE_NAMES = {
    "users": "User",
    "calls": "babylon.calls",
    **{table.lower(): table for table in TABLES},
}

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
    ``agent_id`` apply to traces that name none. ``minutes`` is the length of windows. An import
    that was interrupted goes on where it stopped, as long as the files are unchanged.

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
    await drop_abandoned(store)
    columns = await _columns(store)
    staging = Staging(store, _import_id(sources, window, agent_id, minutes), columns)
    traces = TraceDefaults(window=window, agent_id=agent_id, minutes=minutes)
    try:
        for path, kind in sources:
            if kind is Format.GAME:
                await _stage_game(staging, path)
            else:
                await _stage_traces(staging, path, kind, traces)
        return await staging.insert()
    except ImportFileError:  # the file must change, so that nothing of it can be resumed
        await staging.forget()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDefaults:
    """Window and agent of traces that name none, and the length of windows."""

    window: Window | None
    agent_id: str
    minutes: int


async def _stage_game(staging: Staging, path: Path) -> None:
    table = _table_of(path, staging.columns)
    place = await staging.place(path)
    await staging.stage(path, place, place, [{table: []}])  # an empty file counts too
    rows = read_documents(path, skip_bytes=place.bytes, skip_lines=place.lines)
    for chunk in chunks_of(table, rows):
        last = chunk[table][-1]
        after = FilePlace(last.end, last.line)
        await staging.stage(path, place, after, [chunk])
        place = after


async def _stage_traces(
    staging: Staging, path: Path, kind: Format | None, defaults: TraceDefaults
) -> None:
    """Stage a whole file at once: the records of one trace may be anywhere in it."""
    now = datetime.now(UTC)
    done = FilePlace(path.stat().st_size)
    place = await staging.place(path)
    if place.bytes == done.bytes:
        return
    chunks = (
        _rows_of(
            trace, trace_rows(trace, minutes=defaults.minutes, window=defaults.window, now=now)
        )
        for trace in read_traces(path, kind, defaults.agent_id)
    )
    await staging.stage(path, place, done, _joined(chunks))


def _rows_of(trace: Trace, rows: TraceRows) -> dict[str, list[Document]]:
    agent = rows.trajectory["agentId"]
    tables: dict[str, list[Row]] = {
        "User": [{"id": agent, "username": agent, "displayName": agent, "isAgent": True}],
        "trajectories": [rows.trajectory],
        "llm_call_logs": rows.logs,
        "babylon.calls": [asdict(call) for call in rows.calls],
    }
    return {
        table: [
            Document(
                trace.place,
                {n: storable(v) if isinstance(v, str) else v for n, v in value.items()},
            )
            for value in values
        ]
        for table, values in tables.items()
        if values
    }


def _joined(chunks: Iterable[dict[str, list[Document]]]) -> Iterator[dict[str, list[Document]]]:
    """Join the rows of ``_TRACES`` traces, because a COPY of few rows is slow."""
    waiting = iter(chunks)
    while some := list(islice(waiting, _TRACES)):
        yield {
            table: [row for chunk in some for row in chunk.get(table, ())]
            for table in TABLES
            if any(table in chunk for chunk in some)
        }


def _import_id(
    sources: Sequence[Source], window: Window | None, agent_id: str, minutes: int
) -> str:
    """Return an id that changes with the files and with what decides their rows."""
    files = [
        (str(path.resolve()), str(kind), status.st_size, status.st_mtime_ns)
        for path, kind in sources
        for status in [path.stat()]
    ]
    text = repr((files, window, agent_id, minutes))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


async def _columns(store: Store) -> dict[str, Columns]:
    rows = await store.pool.fetch(
        "SELECT CASE table_schema WHEN 'babylon' THEN 'babylon.' ELSE '' END || table_name,"
        " column_name::text, data_type = 'ARRAY' FROM information_schema.columns"
        " WHERE table_schema IN (current_schema(), 'babylon') ORDER BY ordinal_position"
    )
    columns: dict[str, dict[str, bool]] = {table: {} for table in TABLES}
    for table, name, is_array in rows:
        if table in columns:
            columns[table][name] = is_array
    return dict(columns)


def _table_of(path: Path, columns: Mapping[str, Columns]) -> str:
    """Return the table by file name, else the only table that has all keys of the first row."""
    if table := _FILE_NAMES.get(path.stem.lower()):
        return table
    first = next(iter(read_documents(path)), None)
    if first is None:
        raise ImportFileError(
            f"{path} is empty, and its name is not one of {', '.join(sorted(_FILE_NAMES))}"
        )
    fitting = [table for table in TABLES if first.value.keys() <= columns[table].keys()]
    if len(fitting) != 1:
        raise ImportFileError(
            f"{first.place}: the keys {', '.join(first.value)} fit {len(fitting)} tables: name the"
            f" file after its table ({', '.join(sorted(_FILE_NAMES))}), or pass --format"
        )
    return fitting[0]
