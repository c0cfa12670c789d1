"""Rows on their way into the game's tables: staged by COPY, then inserted in one transaction.

An import is atomic, because a window must not be collected while half of it is there. It is also
resumable: rows are first copied into unlogged tables of the schema ``babylon``, in chunks that
commit together with their place in the file. An import of the same files goes on behind the last
chunk. Memory holds one chunk.
"""

import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import msgspec

from babylon.core.errors import DatabaseError
from babylon.formats.trace import Document, ImportFileError, LeaveOut, refuse
from babylon.store.connection import Connection, Store, affected, one_line
from babylon.store.copy_text import copy_array, copy_text, copy_value

CHUNK_BYTES = 4 << 20
_CHUNK_ROWS = 5_000
_COMPARED = 100  # trajectories at a time
_INSERT_S = 3600.0  # a million rows take minutes, more than a query may
_PLACE = "import_place"  # column of a staging table: file and line
_LINE = re.compile(r", line (\d+)")

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
Columns = Mapping[str, bool]  # name → True for an array
Rows = Mapping[str, Sequence[Document]]  # by table


@dataclass(frozen=True, slots=True)
class FilePlace:
    """The part of a file that is staged."""

    bytes: int = 0
    lines: int = 0


@dataclass(frozen=True, slots=True)
class Staging:
    """The staging tables of one import, named by ``import_id``."""

    store: Store
    import_id: str
    columns: Mapping[str, Columns]

    async def place(self, file: Path) -> FilePlace:
        """Return how much of the file an interrupted import has staged."""
        row = await self.store.pool.fetchrow(
            "INSERT INTO babylon.import_progress (import_id, file) VALUES ($1, $2)"
            " ON CONFLICT (import_id, file) DO UPDATE SET updated_at = now()"
            " RETURNING bytes, lines",
            self.import_id,
            str(file),
        )
        assert row is not None
        return FilePlace(*row)

    async def stage(
        self, file: Path, before: FilePlace, after: FilePlace, chunks: Iterable[Rows]
    ) -> None:
        """Copy rows and move the file's place on, in one transaction.

        Raises:
            ImportFileError: a row cannot be stored; the message names its line.
            DatabaseError: another import stages the same files.
        """
        async with self.store.pool.acquire() as connection, connection.transaction():
            moved = await connection.execute(
                "UPDATE babylon.import_progress SET bytes = $4, lines = $5, updated_at = now()"
                " WHERE import_id = $1 AND file = $2 AND bytes = $3",
                self.import_id,
                str(file),
                before.bytes,
                after.bytes,
                after.lines,
            )
            if not affected(moved):
                raise DatabaseError(f"{file} is being imported already: wait for that import")
            for chunk in chunks:
                for table, rows in chunk.items():
                    await self._copy(connection, table, rows)

    async def insert(self, leave_out: LeaveOut = refuse) -> dict[str, int]:
        """Insert the staged rows and drop the staging tables; return the new rows by table.

        Raises:
            ImportFileError: a trajectory names an unknown agent; or one of its id is stored, and
                lacks calls of it, unless ``leave_out`` goes on.
        """
        added: dict[str, int] = {}
        async with self.store.pool.acquire() as connection, connection.transaction():
            # the first of two equal rows counts, so each table is read from its beginning
            await connection.execute("SET LOCAL synchronize_seqscans = off")
            for table in TABLES:
                if not await self._is_staged(connection, table):
                    continue
                if table == "trajectories":
                    await self._check_agents(connection)
                names = ", ".join(f'"{name}"' for name in self.columns[table])
                status = await connection.execute(
                    f"INSERT INTO {quoted(table)} ({names}) SELECT {names}"
                    f" FROM {self._staging(table)} ON CONFLICT DO NOTHING",
                    timeout=_INSERT_S,
                )
                added[table] = affected(status)
                if table == "trajectories":
                    await self._leave_out_others(connection, leave_out)
            await _drop(connection, [self.import_id])
        return added

    async def create(self, connection: Connection, table: str) -> None:
        """Create the table's staging table, unless it exists."""
        await connection.execute(
            f"CREATE UNLOGGED TABLE IF NOT EXISTS {self._staging(table)} (LIKE {quoted(table)}"
            f" INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE, {_PLACE} text)"
        )

    async def forget(self) -> None:
        """Drop what is staged."""
        async with self.store.pool.acquire() as connection, connection.transaction():
            await _drop(connection, [self.import_id])

    async def _copy(self, connection: Connection, table: str, rows: Sequence[Document]) -> None:
        """Copy rows, those with the same keys together: absent keys get the column's default."""
        await self.create(connection, table)
        columns = self.columns[table]
        same_keys: defaultdict[tuple[str, ...], list[Document]] = defaultdict(list)
        for row in rows:
            same_keys[tuple(row.value)].append(row)
        for names, group in same_keys.items():
            if unknown := set(names) - columns.keys():
                raise ImportFileError(
                    f"{group[0].place}: table {table} has no column {', '.join(sorted(unknown))}"
                )
            if not names:
                raise ImportFileError(f"{group[0].place}: the object has no keys")
            arrays = [columns[name] for name in names]
            try:
                await connection.copy_to_table(
                    self._name(table),
                    schema_name="babylon",
                    columns=[*names, _PLACE],
                    source=_source(_line(row, arrays) for row in group),
                )
            except asyncpg.PostgresError as error:
                raise self._named(error, table, group) from error

    def _named(
        self, error: asyncpg.PostgresError, table: str, rows: Sequence[Document]
    ) -> ImportFileError:
        """Return the error with the line of its row. Postgres tells the line within the COPY."""
        found = _LINE.search(getattr(error, "context", None) or "")
        row = rows[int(found[1]) - 1 if found else 0]
        reason, _, _ = one_line(error).partition(" DETAIL: Failing row")  # the row may be long
        return ImportFileError(f"{row.place}: {reason.replace(self._name(table), table)}")

    async def _check_agents(self, connection: Connection) -> None:
        row = await connection.fetchrow(
            f'SELECT {_PLACE}, "agentId" FROM {self._staging("trajectories")} t WHERE NOT EXISTS'
            ' (SELECT FROM "User" u WHERE u.id = t."agentId") ORDER BY t.ctid LIMIT 1'
        )
        if row is not None:
            raise ImportFileError(
                f"{row[0]}: table User has no row of agentId {row[1]!r}: import the users in the"
                " same command (`babylon db import users.jsonl trajectories.jsonl`)"
            )

    async def _leave_out_others(self, connection: Connection, leave_out: LeaveOut) -> None:
        """Leave out trajectories with calls that the stored one of the same id does not have."""
        both = f'{self._staging("trajectories")} s JOIN trajectories t USING ("trajectoryId")'
        differing = await connection.fetch(
            f'SELECT s.ctid::text FROM {both} WHERE s."stepsJson" <> t."stepsJson"',
            timeout=_INSERT_S,
        )
        left: list[tuple[str, str]] = []
        for start in range(0, len(differing), _COMPARED):
            rows = await connection.fetch(
                f'SELECT s.{_PLACE}, "trajectoryId", s."stepsJson", t."stepsJson" FROM {both}'
                " WHERE s.ctid = ANY($1::text[]::tid[]) ORDER BY s.ctid",
                [row[0] for row in differing[start : start + _COMPARED]],
            )
            for place, name, staged, stored in rows:
                if _replies(staged) - _replies(stored):
                    left.append((place, name))
                    leave_out(
                        ImportFileError(
                            f"{place}: trajectory {name!r} is stored already, with other calls:"
                            " keep its records in one file, and import them once it has ended"
                        )
                    )
        if left:
            await self._forget_parts(connection, left)

    async def _forget_parts(
        self, connection: Connection, trajectories: Sequence[tuple[str, str]]
    ) -> None:
        """Delete staged logs and tokens of these trajectories, each a place and an id.

        They would join the calls of the stored trajectory. Those of a trace have its place, and
        those of the game's rows lines of their own: they go if no trajectory of their id is left.
        """
        places, names = zip(*trajectories, strict=True)
        gone = await self._without_row(connection, places, names)
        for table, name in (("llm_call_logs", "trajectoryId"), ("babylon.calls", "trajectory_id")):
            if await self._is_staged(connection, table):
                await connection.execute(
                    f'DELETE FROM {self._staging(table)} WHERE "{name}" = ANY($3::text[])'
                    f' OR ({_PLACE}, "{name}") IN'
                    " (SELECT * FROM unnest($1::text[], $2::text[]))",
                    places,
                    names,
                    gone,
                    timeout=_INSERT_S,
                )

    async def _without_row(
        self, connection: Connection, places: Sequence[str], names: Sequence[str]
    ) -> list[str]:
        """Return the ids whose staged trajectories are all among these."""
        rows = await connection.fetch(
            f'SELECT "trajectoryId" FROM {self._staging("trajectories")}'
            ' WHERE "trajectoryId" = ANY($2::text[]) GROUP BY 1'
            f' HAVING bool_and(({_PLACE}, "trajectoryId") IN'
            " (SELECT * FROM unnest($1::text[], $2::text[])))",
            places,
            names,
            timeout=_INSERT_S,
        )
        return [row[0] for row in rows]

    async def _is_staged(self, connection: Connection, table: str) -> bool:
        name = f"babylon.{self._name(table)}"
        return await connection.fetchval("SELECT to_regclass($1)", name) is not None

    def _name(self, table: str) -> str:
        return f"import_{self.import_id}_{TABLES.index(table)}"

    def _staging(self, table: str) -> str:
        return f"babylon.{self._name(table)}"


def _replies(steps: str) -> set[tuple[object, object]]:
    """Return time and text of every reply. Steps that are not the game's have none."""
    with suppress(msgspec.DecodeError, RecursionError, AttributeError, KeyError, TypeError):
        return {
            (step["timestamp"], call.get("response") or "")
            for step in msgspec.json.decode(steps)
            for call in step.get("llmCalls", ())
        }
    return set()


def chunks_of(table: str, rows: Iterable[Document]) -> Iterator[Rows]:
    """Yield the rows of one table in chunks that end between two places of the file."""
    chunk: list[Document] = []
    for row in rows:
        size = chunk[-1].end - chunk[0].end if chunk else 0
        full = len(chunk) >= _CHUNK_ROWS or size >= CHUNK_BYTES
        if full and row.end != chunk[-1].end:
            yield {table: chunk}
            chunk = []
        chunk.append(row)
    if chunk:
        yield {table: chunk}


async def drop_abandoned(store: Store) -> None:
    """Drop what imports staged that nobody resumed for a day."""
    async with store.pool.acquire() as connection, connection.transaction():
        rows = await connection.fetch(
            "SELECT import_id FROM babylon.import_progress GROUP BY 1"
            " HAVING max(updated_at) < now() - interval '1 day'"
        )
        await _drop(connection, [row[0] for row in rows])


async def _drop(connection: Connection, import_ids: Sequence[str]) -> None:
    for import_id in import_ids:
        for number in range(len(TABLES)):
            await connection.execute(f"DROP TABLE IF EXISTS babylon.import_{import_id}_{number}")
    await connection.execute(
        "DELETE FROM babylon.import_progress WHERE import_id = ANY($1)", import_ids
    )


def quoted(table: str) -> str:
    """Return the table's name for SQL."""
    return ".".join(f'"{part}"' for part in table.split("."))


def _line(row: Document, arrays: Sequence[bool]) -> str:
    fields = [
        copy_array(value) if array and isinstance(value, list | tuple) else copy_value(value)
        for value, array in zip(row.value.values(), arrays, strict=True)
    ]
    return "\t".join([*fields, copy_text(row.place)]) + "\n"


async def _source(lines: Iterable[str]) -> AsyncIterator[bytes]:
    yield "".join(lines).encode()
