"""Rows of all tables as compressed files of COPY's text format, written and read.

No program of PostgreSQL takes part, and no version of its archive format: the migrations make the
tables, and COPY's text fills them. So any supported version restores the backup of any other.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pyarrow as pa

from babylon.formats.staging import TABLES
from babylon.store.connection import Connection as PoolConnection
from babylon.store.connection import affected

# Quoted, because asyncpg's classes are generic in its stubs only.
Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record] | PoolConnection"
_TABLE_S = 24 * 3600.0  # the largest table takes hours, so no limit of a query holds here
OURS = "babylon"
# The migrations write the first two. The others are about processes that run now.
_LEFT_OUT = {"alembic_version", "database", "gateways", "gateway_probes", "quarantine", "line"}
_CHUNK = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRows:
    """The rows of one table. ``ours``: of schema babylon, otherwise one of the game's."""

    name: str
    ours: bool
    columns: tuple[str, ...]
    rows: int

    @property
    def file(self) -> str:
        return f"{OURS if self.ours else 'game'}.{self.name}.zst"


async def write_tables(
    connection: Connection, directory: Path, *, with_game: bool
) -> list[TableRows]:
    """Write the tables in the order in which they can be filled again.

    The caller's transaction must be repeatable read: it is the moment that the backup shows.
    """
    schemas = {OURS: True} | ({await _game_schema(connection): False} if with_game else {})
    found = await connection.fetch(_TABLES, list(schemas))
    tables = {
        (row["schema"], row["name"]): row
        for row in found
        if (row["name"] not in _LEFT_OUT if schemas[row["schema"]] else row["name"] in TABLES)
    }
    order = TopologicalSorter(
        {key: [(key[0], name) for name in row["needs"]] for key, row in tables.items()}
    )
    directory.mkdir()
    return [
        await _write(connection, directory, schemas[key[0]], tables[key])
        for key in order.static_order()
        if key in tables
    ]


async def read_tables(connection: Connection, directory: Path, tables: Iterable[TableRows]) -> None:
    """Fill the empty tables of the same schema version, in the caller's transaction."""
    game = await _game_schema(connection)
    for table in tables:
        schema = OURS if table.ours else game
        with pa.input_stream(str(directory / table.file), compression="zstd") as stream:
            await connection.copy_to_table(
                table.name,
                schema_name=schema,
                columns=table.columns,
                source=_chunks(stream),
                timeout=_TABLE_S,
            )
        for column in await connection.fetch(_IDENTITIES, schema, table.name):
            await connection.execute(
                f"SELECT setval(pg_get_serial_sequence($1, $2), max({column['name']}))"
                f" FROM {_quoted(schema, table.name)}",
                _quoted(schema, table.name),
                column["name"],
            )


async def filled(connection: Connection, tables: Iterable[TableRows]) -> str | None:
    """Return a table that has rows, of those that exist; None if all are empty."""
    game = await _game_schema(connection)
    for table in tables:
        name = _quoted(OURS if table.ours else game, table.name)
        if await connection.fetchval("SELECT to_regclass($1)", name) is None:
            continue
        if await connection.fetchval(f"SELECT EXISTS (SELECT FROM {name})"):
            return name
    return None


async def _write(
    connection: Connection, directory: Path, ours: bool, row: asyncpg.Record
) -> TableRows:
    table = TableRows(name=row["name"], ours=ours, columns=tuple(row["columns"]), rows=0)
    columns = ", ".join(_quoted(name) for name in table.columns)
    with _compressed(directory / table.file) as stream:

        async def write(data: bytes) -> None:
            stream.write(data)

        # A query, because COPY reads no partitioned table by its name.
        status = await connection.copy_from_query(
            f"SELECT {columns} FROM {_quoted(row['schema'], table.name)}",
            output=write,
            timeout=_TABLE_S,
        )
    return replace(table, rows=affected(status))


@contextmanager
def _compressed(path: Path) -> Iterator[Any]:
    with pa.output_stream(str(path), compression="zstd") as stream:
        yield stream


def _chunks(stream: Any) -> Any:
    async def read() -> Any:
        while data := stream.read(_CHUNK):
            yield data

    return read()


async def _game_schema(connection: Connection) -> str:
    found: str | None = await connection.fetchval("SELECT current_schema()")
    return found or "public"


def _quoted(*names: str) -> str:
    return ".".join('"{}"'.format(name.replace('"', '""')) for name in names)


# ``needs``: tables of the same schema that a foreign key names. Generated columns have no data, and
# partitions are read through their parent. Unlogged tables belong to an import that is under way.
_TABLES = """
SELECT n.nspname AS schema, c.relname AS name,
       (SELECT array_agg(a.attname::text ORDER BY a.attnum) FROM pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
          AND a.attgenerated = '') AS columns,
       ARRAY(SELECT DISTINCT t.relname::text
             FROM pg_constraint f JOIN pg_class t ON t.oid = f.confrelid
             WHERE f.conrelid = c.oid AND f.contype = 'f' AND t.oid <> c.oid) AS needs
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = ANY($1) AND c.relkind IN ('r', 'p') AND NOT c.relispartition
  AND c.relpersistence = 'p'
ORDER BY 1, 2
"""

_IDENTITIES = """
SELECT a.attname::text AS name
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
     JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relname = $2 AND a.attidentity <> '' AND NOT a.attisdropped
"""
