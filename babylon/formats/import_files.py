"""``babylon db import``: the game's own rows, or traces of other systems, into the game's tables.

A file of the game's rows holds one table. The file's name or the keys of its first row identify the
table, and Postgres converts each value to the column's type. A trace becomes a trajectory with its
call log, and recorded calls if its tokens are known. Existing rows stay unchanged.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from babylon.core.errors import DatabaseError
from babylon.core.llm_calls import JsonObject
from babylon.core.text import storable
from babylon.core.windows import Window
from babylon.formats.atif import read_atif
from babylon.formats.chat_lines import read_chats
from babylon.formats.format_names import Format
from babylon.formats.langfuse import is_langfuse, read_langfuse
from babylon.formats.langsmith import is_langsmith, read_langsmith
from babylon.formats.otlp import is_otlp
from babylon.formats.sharegpt import as_chat
from babylon.formats.spans import read_span_traces
from babylon.formats.staging import (
    CHUNK_BYTES,
    TABLES,
    Columns,
    FilePlace,
    Staging,
    chunks_of,
    drop_abandoned,
)
from babylon.formats.trace import (
    Document,
    ImportFileError,
    LeaveOut,
    T,
    Trace,
    read_documents,
    refuse,
)
from babylon.formats.trace_rows import TraceRows, trace_rows
from babylon.recorder.trajectory import Row
from babylon.store.connection import Store

DEFAULT_AGENT = "imported"
_TRACES = 100  # staged at a time, at most
_NAMED = 20  # of a file's items that are left out; the others are counted
log = logging.getLogger(__name__)


def guess_format(path: Path) -> Format | None:
    """Guess a file's format from its name, else from the keys of its first object.

    ``None`` stands for spans; their attributes give the dialect.

    Raises:
        ImportFileError: the file cannot be read.
    """
    if path.stem.lower() in _FILE_NAMES:
        return Format.GAME
    first = next(iter(read_documents(path, leave_out=lambda _: None)), None)
    value = first.value if first else {}
    return next((format for format, fits in _SIGNS.items() if fits(value)), Format.GAME)


_SIGNS: dict[Format | None, Callable[[JsonObject], bool]] = {
    None: is_otlp,
    Format.ATIF: lambda value: "schema_version" in value and "steps" in value,
    Format.SHAREGPT: lambda value: isinstance(value.get("conversations"), list),
    Format.LANGSMITH: is_langsmith,
    Format.LANGFUSE: is_langfuse,
    Format.CHAT: lambda value: isinstance(value.get("messages"), list),
}


def read_traces(
    path: Path,
    format: Format | None,
    agent_id: str = DEFAULT_AGENT,
    leave_out: LeaveOut = refuse,
) -> Iterator[Trace]:
    """Yield the traces of one file of any format except the game's.

    Raises:
        ImportFileError: an item cannot be read, unless ``leave_out`` goes on. The message names it.
    """
    documents: Iterable[Document] = read_documents(path, leave_out=leave_out)
    # Only ATIF and ShareGPT hold a whole trace in each document; the others join records.
    match format:
        case Format.ATIF:
            yield from _each(documents, read_atif, leave_out)
        case Format.CHAT:
            yield from read_chats(documents, agent_id, leave_out)
        case Format.SHAREGPT:
            chats = _each(documents, lambda document: (as_chat(document),), leave_out)
            yield from read_chats(chats, agent_id, leave_out)
        case Format.LANGFUSE:
            yield from read_langfuse(documents, agent_id, leave_out)
        case Format.LANGSMITH:
            yield from read_langsmith(documents, agent_id, leave_out)
        case Format.OTEL:
            yield from read_span_traces(documents, agent_id, "otel", leave_out)
        case Format.OPENINFERENCE:
            yield from read_span_traces(documents, agent_id, "openinference", leave_out)
        case None:
            yield from read_span_traces(documents, agent_id, None, leave_out)
        case Format.GAME:
            raise ImportFileError(f"{path}: a file of the game's rows holds no traces")


def _each(
    documents: Iterable[Document], read: Callable[[Document], Iterable[T]], leave_out: LeaveOut
) -> Iterator[T]:
    for document in documents:
        try:
            yield from list(read(document))
        except ImportFileError as error:
            leave_out(error)


@dataclass(slots=True)
class LeftOut:
    """The items of a file that could not be read: named in the log, and counted."""

    count: int = 0
    first: str = ""

    def __call__(self, error: ImportFileError) -> None:
        self.count += 1
        self.first = self.first or str(error)
        if self.count <= _NAMED:
            log.warning("left out: %s", error)


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

    Items of a trace file that cannot be read are named in the log and left out, and so are
    trajectories with calls that the stored one of the same id lacks; ``left_out`` counts them. A
    file of the game's rows is imported whole or not at all.

    ``format`` applies to every file; by default each file's format is guessed. ``window`` and
    ``agent_id`` apply to traces that name none. ``minutes`` is the length of windows. An import
    that was interrupted goes on where it stopped, as long as the files are unchanged.

    Raises:
        DatabaseError: the database is the game's own, a line of the game's rows cannot be imported,
            or no item of a trace file can (the message names file, line and reason). Nothing is
            written then.
    """
    if not store.game_tables_ours:
        raise DatabaseError(
            "nothing is imported into the game's own database: unset DATABASE_URL to import into"
            " the embedded database"
        )
    files = [*paths]
    for path in files:
        if path.exists() and not path.is_file():  # a pipe is empty, or blocks, the second time
            raise ImportFileError(f"{path} is read more than once: write it to a regular file")
    sources = [(path, format or guess_format(path)) for path in files]
    await drop_abandoned(store)
    columns = await _columns(store)
    staging = Staging(store, _import_id(sources, window, agent_id, minutes), columns)
    traces = TraceDefaults(window=window, agent_id=agent_id, minutes=minutes)
    left_out = 0
    try:
        for path, kind in sources:
            if kind is Format.GAME:
                await _stage_game(staging, path)
            else:
                left_out += await _stage_traces(staging, path, kind, traces)
        others = LeftOut()
        added = await staging.insert(others)
        left_out += others.count
        return {**added, "left_out": left_out} if left_out else added
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
) -> int:
    """Stage a whole file at once → number of items left out.

    The records of one trace may be anywhere in the file.
    """
    done = FilePlace(path.stat().st_size)
    place = await staging.place(path)
    if place.bytes == done.bytes:
        return 0
    left = LeftOut()
    await staging.stage(path, place, done, _joined(_trace_chunks(path, kind, defaults, left)))
    return left.count


def _trace_chunks(
    path: Path, kind: Format | None, defaults: TraceDefaults, left: LeftOut
) -> Iterator[dict[str, list[Document]]]:
    now = datetime.now(UTC)
    read = 0
    for trace in read_traces(path, kind, defaults.agent_id, left):
        try:
            rows = trace_rows(trace, minutes=defaults.minutes, window=defaults.window, now=now)
        except ImportFileError as error:
            left(error)
            continue
        read += 1
        yield _rows_of(trace, rows)
    if left.count and not read:
        raise ImportFileError(
            f"none of {left.count} items can be imported; the first: {left.first}"
        )
    if not read and next(read_documents(path), None):
        raise ImportFileError(
            f"{path} holds no call of a model: name its format by --format, and keep calls and what"
            " belongs to them, as scores, in one file"
        )


def _rows_of(trace: Trace, rows: TraceRows) -> dict[str, list[Document]]:
    agent = rows.trajectory["agentId"]
    tables: dict[str, list[Row]] = {
        "User": [{"id": agent, "displayName": agent, "isAgent": True}],
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
    """Join the rows of up to ``_TRACES`` traces, because a COPY of few rows is slow.

    A long conversation has the prompts before it in each call, so a small file can have large rows.
    """
    waiting: list[dict[str, list[Document]]] = []
    size = 0
    for chunk in chunks:
        waiting.append(chunk)
        size += sum(map(_characters, chain.from_iterable(chunk.values())))
        if len(waiting) >= _TRACES or size >= CHUNK_BYTES:
            yield _by_table(waiting)
            waiting, size = [], 0
    if waiting:
        yield _by_table(waiting)


def _characters(row: Document) -> int:
    return sum(len(value) for value in row.value.values() if isinstance(value, str))


def _by_table(chunks: Sequence[dict[str, list[Document]]]) -> dict[str, list[Document]]:
    return {
        table: [row for chunk in chunks for row in chunk.get(table, ())]
        for table in TABLES
        if any(table in chunk for chunk in chunks)
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
