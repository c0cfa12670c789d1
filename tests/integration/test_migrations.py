"""Migrations of a blank database, of each version, and of a foreign database."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from babylon.core.errors import ConfigError, DatabaseError
from babylon.core.settings_loading import load_settings
from babylon.migrations import VERSIONS
from babylon.store import database_status, open_store
from babylon.store.address import parse_url
from babylon.store.migrate import HEAD, current_revision, migrate

REVISIONS = [file.name[:4] for file in sorted(VERSIONS.glob("0*.py"))]
GAME = (VERSIONS / "0001_game_tables.sql").read_text()
EVERYTHING = """
    SELECT n.nspname, c.relname, c.relkind::text, a.attname, a.atttypid::regtype::text, a.atttypmod,
           a.attnotnull, a.attstorage::text, pg_get_expr(d.adbin, d.adrelid), c.xmin::text
    FROM pg_class c
    JOIN pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
    LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
    WHERE n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', 'babylon')
    UNION ALL
    SELECT n.nspname, t.relname, 'constraint', k.conname, pg_get_constraintdef(k.oid), 0, true, '',
           '', k.xmin::text
    FROM pg_constraint k
    JOIN pg_class t ON t.oid = k.conrelid
    JOIN pg_namespace n ON n.oid = t.relnamespace
    WHERE n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', 'babylon')
    ORDER BY 1, 2, 3, 4
"""
TWO_MIGRATIONS = """
import asyncio, sys
import alembic.command, sqlalchemy.dialects.postgresql.asyncpg, sqlalchemy.ext.asyncio
from babylon.store.address import parse_url
from babylon.store.migrate import migrate

async def main():
    arguments = parse_url(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.readline()
    await asyncio.gather(migrate(arguments), migrate(arguments))

asyncio.run(main())
"""


async def _run(url: str, sql: str) -> list[Any]:
    connection = await asyncpg.connect(url)
    try:
        if sql.lstrip().startswith("SELECT"):
            return [tuple(row) for row in await connection.fetch(sql)]
        await connection.execute(sql)
        return []
    finally:
        await connection.close()


async def _revision(url: str) -> str | None:
    connection = await asyncpg.connect(url)
    try:
        return await current_revision(connection)
    finally:
        await connection.close()


@pytest.mark.parametrize("version", [None, *REVISIONS[:-1]])
async def test_from_each_version_to_the_newest_with_the_same_result(
    blank_database_url: str, database_url: str, version: str | None
) -> None:
    arguments = parse_url(blank_database_url)
    if version is not None:
        await migrate(arguments, version)
        assert await _revision(blank_database_url) == version
    await migrate(arguments)
    assert await _revision(blank_database_url) == HEAD
    schema = EVERYTHING.replace(", 'babylon'", "").replace("xmin::text", "oid::regclass::text")
    schema = schema.replace("k.oid::regclass", "k.conrelid::regclass")
    assert await _run(blank_database_url, schema) == await _run(database_url, schema)


async def test_concurrent_migrations_queue(blank_database_url: str) -> None:
    """Two processes with two migrations each; all four begin at once."""
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", TWO_MIGRATIONS, blank_database_url),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
    await asyncio.gather(*(process.communicate(b"go\n") for process in processes))
    assert [process.returncode for process in processes] == [0, 0]
    assert await _revision(blank_database_url) == HEAD


@pytest.mark.parametrize("theirs", [GAME, "CREATE SCHEMA shop; CREATE TABLE shop.orders (id int)"])
async def test_a_foreign_database_gets_our_schema_and_keeps_its_own_data(
    blank_database_url: str, tmp_path: Path, theirs: str
) -> None:
    await _run(blank_database_url, theirs)
    before = await _run(blank_database_url, EVERYTHING)
    settings = load_settings(database={"url": blank_database_url}, home=tmp_path)
    async with open_store(settings, migrate=True) as store:
        assert not store.game_tables_ours
        assert store.has_game_tables is (theirs == GAME)
        assert await store.pool.fetchval("SELECT count(*) FROM babylon.windows") == 0
    assert await _run(blank_database_url, EVERYTHING) == before


async def test_a_database_with_added_tables_stays_ours(database_url: str, tmp_path: Path) -> None:
    await _run(database_url, "CREATE TABLE later (id int)")
    async with open_store(load_settings(database={"url": database_url}, home=tmp_path)) as store:
        assert store.game_tables_ours


async def test_a_database_with_extension_is_ours(blank_database_url: str, tmp_path: Path) -> None:
    await _run(
        blank_database_url,
        "CREATE TABLE of_extension (id int); ALTER EXTENSION plpgsql ADD TABLE of_extension",
    )
    settings = load_settings(database={"url": blank_database_url}, home=tmp_path)
    async with open_store(settings, migrate=True) as store:
        assert store.game_tables_ours


async def test_a_failing_migration_leaves_nothing(blank_database_url: str) -> None:
    await _run(blank_database_url, "CREATE SCHEMA babylon; CREATE TABLE babylon.scores (id int)")
    with pytest.raises(asyncpg.DuplicateTableError):
        await migrate(parse_url(blank_database_url))
    tables = await _run(
        blank_database_url, "SELECT tablename FROM pg_tables WHERE schemaname = 'babylon'"
    )
    assert tables == [("scores",)]


async def test_unmigrated_databases_name_a_remedy(blank_database_url: str, tmp_path: Path) -> None:
    settings = load_settings(database={"url": blank_database_url}, home=tmp_path)
    with pytest.raises(DatabaseError, match=r"at version none, not \d+: run `babylon db migrate`"):
        async with open_store(settings):
            pass
    status = await database_status(settings.database, settings.home)
    assert (status.revision, status.head, status.game_tables_ours) == (None, HEAD, None)
    async with open_store(settings, migrate=True):
        pass
    status = await database_status(settings.database, settings.home)
    assert (status.revision, status.game_tables_ours, status.has_game_tables) == (HEAD, True, True)


async def test_a_newer_database_is_left_alone(database_url: str, tmp_path: Path) -> None:
    await _run(database_url, "UPDATE babylon.alembic_version SET version_num = '9999'")
    with pytest.raises(DatabaseError, match="at version 9999, this program knows versions up to"):
        async with open_store(load_settings(database={"url": database_url}, home=tmp_path)):
            pass


async def test_the_missing_right_is_named(blank_database_url: str, tmp_path: Path) -> None:
    await _run(blank_database_url, "CREATE ROLE guest LOGIN PASSWORD 'guest'")
    url = "postgresql://guest:guest@" + blank_database_url.split("@")[1]
    try:
        with pytest.raises(DatabaseError, match="may not create schema babylon"):
            async with open_store(
                load_settings(database={"url": url}, home=tmp_path), migrate=True
            ):
                pass
    finally:
        await _run(blank_database_url, "DROP ROLE guest")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("@127.0.0.1:", "@127.0.0.1:1"), "names no usable port: write a number"),
        (("@127.0.0.1", "@no-such-host.invalid"), r"no database answers at no-such-host\.invalid:"),
        (("/test_", "/absent_"), r'absent_\w+ refuses the connection \(database "absent_'),
        (("://babylon:", "://babylon:x"), r"refuses the connection \(password authentication"),
        (("postgresql://", "mysql://"), "DATABASE_URL starts with 'mysql'"),
    ],
)
async def test_a_database_out_of_reach_is_one_line_without_the_password(
    database_url: str, tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    settings = load_settings(database={"url": database_url.replace(*change)}, home=tmp_path)
    with pytest.raises((DatabaseError, ConfigError), match=message) as caught:
        async with open_store(settings):
            pass
    assert "\n" not in str(caught.value)
    assert database_url.split(":")[2].split("@")[0] not in str(caught.value)


async def test_a_refused_connection_names_host_and_port(tmp_path: Path) -> None:
    settings = load_settings(database={"url": "postgresql://u:p@127.0.0.1:1/game"}, home=tmp_path)
    with pytest.raises(DatabaseError, match=r"no database answers at 127\.0\.0\.1:1/game"):
        async with open_store(settings):
            pass


async def test_prisma_urls_are_understood(database_url: str, tmp_path: Path) -> None:
    url = f"{database_url}?schema=public&connection_limit=5&pgbouncer=true"
    async with open_store(load_settings(database={"url": url}, home=tmp_path)) as store:
        assert store.has_game_tables
    url = url.replace("schema=public", "schema=elsewhere")
    async with open_store(load_settings(database={"url": url}, home=tmp_path)) as store:
        assert not store.has_game_tables


async def test_absolute_paths_of_the_first_version_become_references(
    blank_database_url: str,
) -> None:
    arguments = parse_url(blank_database_url)
    await migrate(arguments, "0001")
    await _run(
        blank_database_url,
        """
        INSERT INTO babylon.policies (policy_version, kind, uri, base_model, verdict) VALUES
            (0, 'base', '/old/home/models/embedded-96x3-seed0-efe04a', 'e', NULL),
            (1, 'lora', '/old/home/checkpoints/2025-11-14T0900+short-e12', 'e',
             '{"report": "/old/home/arena/2025-11-14T0900-e1", "promote": true}'),
            (2, 'base', '/data/models/qwen', 'q', '{"report": null}'),
            (3, 'base', 'Qwen/Qwen2.5-0.5B', 'q', NULL);
        INSERT INTO babylon.windows (window_id, minutes, scored) VALUES ('w', 60, '{
            "artifact": {"uri": "file:///my%20home/artifacts/2025-11-14T09-00%2Bx-scored-1.parquet"},
            "held_out": null}');
        """,
    )
    await migrate(arguments)
    rows = await _run(
        blank_database_url,
        "SELECT uri, verdict->>'report' FROM babylon.policies ORDER BY policy_version",
    )
    assert rows == [
        ("home:models/embedded-96x3-seed0-efe04a", None),
        ("home:checkpoints/2025-11-14T0900+short-e12", "home:arena/2025-11-14T0900-e1"),
        ("/data/models/qwen", None),
        ("Qwen/Qwen2.5-0.5B", None),
    ]
    ((uri,),) = await _run(
        blank_database_url, "SELECT scored #>> '{artifact,uri}' FROM babylon.windows"
    )
    assert uri == "home:artifacts/2025-11-14T09-00+x-scored-1.parquet"
