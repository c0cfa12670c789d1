"""Upgrades of a running system: from the first released version, with data, beside writers of that
version and a long reader."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import msgspec
import pytest

from babylon import migrations
from babylon.core.errors import DatabaseError
from babylon.core.home import Home
from babylon.core.settings import DatabaseSettings
from babylon.ops.backup.backup import FORMAT, MANIFEST, TABLES, Manifest
from babylon.ops.backup.files import sha256
from babylon.ops.backup.restore import _fill, restore
from babylon.ops.backup.tables import write_tables
from babylon.store import migrate as migrate_module
from babylon.store.address import parse_url
from babylon.store.migrate import current_revision, migrate
from tests.conftest import EmbeddedPostgres, OtherPostgres, fresh_database

FIRST = "0001"
ADD_COLUMN = """
from alembic import op
revision, down_revision = "9001", {head!r}
def upgrade():
    op.execute("ALTER TABLE babylon.calls ADD COLUMN newest text")
    op.execute("ALTER TABLE babylon.windows ADD COLUMN newest integer NOT NULL DEFAULT 0")
"""
ADD_INDEX = """
from babylon.migrations import run_concurrently
revision, down_revision = "9002", "9001"
def upgrade():
    run_concurrently("9002_index.sql")
"""
# A partitioned table takes no index concurrently; its partitions do.
INDEX = """
DROP INDEX CONCURRENTLY IF EXISTS babylon.calls_newest;
CREATE INDEX CONCURRENTLY calls_newest ON babylon.calls_first (newest);
"""

# Statements of version 0001's programs. Never change them: they are what an older gateway sends.
OF_THE_FIRST_RELEASE = {
    "calls": """
        INSERT INTO babylon.calls (call_id, agent_id, trajectory_id, step_number, policy_version,
            route_version, model, messages, response, prompt_token_ids, completion_token_ids,
            logprobs, temperature, top_p, max_tokens, seed, finish_reason, trainable,
            untrainable_reason, started_at, latency_ms, arm, key_id, parameters)
        VALUES ($1, 'a', 't', 1, 0, 1, 'babylon', '[]', 'hold', '{1}', '{2}', '{-0.5}', 1, 1, 9,
            NULL, 'stop', true, NULL, now(), 12, 'champion', NULL, '{}') ON CONFLICT DO NOTHING""",
    "gateways": """
        INSERT INTO babylon.gateways (gateway_id, url, route_version, problem, recorded_until,
            loaded, refusals, in_flight, proposals_read)
        VALUES ($1, 'http://localhost', 1, NULL, now(), '{0}', '{}', '{}', NULL)
        ON CONFLICT (gateway_id) DO UPDATE SET seen_at = now()""",
    "trajectory_arms": """
        INSERT INTO babylon.trajectory_arms (salt, trajectory_id, arm)
        VALUES ('salt', $1, 'champion') ON CONFLICT DO NOTHING""",
    "windows": """
        INSERT INTO babylon.windows (window_id, minutes) VALUES ($1, 60) ON CONFLICT DO NOTHING""",
    "collected": "INSERT INTO babylon.collected (window_id, trajectory_id) VALUES ($1, 't')",
    "trained": """
        INSERT INTO babylon.trained (trajectory_id, window_id, batch_id) VALUES ($1, 'w', 'b')""",
    "scores": """
        INSERT INTO babylon.scores (window_id, trajectory_id, scorer, score, components, low,
            high, reasons, seen) VALUES ('w', $1, 'heuristic', 0.5, '{}', NULL, NULL, '{}', NULL)
        """,
}


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's versions, and two more: columns of busy tables, and an index."""
    folder = tmp_path / "migrations"
    shutil.copytree(Path(migrations.__file__).parent, folder)
    versions = folder / "versions"
    (versions / "9001_columns.py").write_text(ADD_COLUMN.format(head=migrate_module.HEAD))
    (versions / "9002_index.py").write_text(ADD_INDEX)
    (versions / "9002_index.sql").write_text(INDEX)
    monkeypatch.setattr(migrate_module, "_SCRIPTS", folder)
    monkeypatch.setattr(migrations, "VERSIONS", versions)


@pytest.fixture
async def first(blank_database_url: str) -> str:
    """A database of the first released version, with data."""
    await migrate(parse_url(blank_database_url), FIRST)
    connection = await asyncpg.connect(blank_database_url)
    for statement in OF_THE_FIRST_RELEASE.values():
        await connection.executemany(statement, [(f"old-{n}",) for n in range(2000)])
    await connection.close()
    return blank_database_url


@asynccontextmanager
async def writing(url: str) -> AsyncIterator[dict[str, int]]:
    """Write with the first release's statements all the while; yield the count of each.

    An insert that waits a second for a lock fails, and with it the block.
    """
    written = dict.fromkeys(OF_THE_FIRST_RELEASE, 0)

    async def write(name: str, statement: str) -> None:
        connection = await asyncpg.connect(url)
        try:
            await connection.execute("SET lock_timeout = '1s'")
            while True:
                await connection.execute(statement, f"new-{written[name]}")
                written[name] += 1
                await asyncio.sleep(0.005)
        finally:
            connection.terminate()

    async with asyncio.TaskGroup() as group:
        writers = [group.create_task(write(*one)) for one in OF_THE_FIRST_RELEASE.items()]
        await asyncio.sleep(0.1)
        yield written
        for writer in writers:
            writer.cancel()


async def test_an_upgrade_under_load_blocks_no_insert_for_a_second(first: str, newer: None) -> None:
    reader = await asyncpg.connect(first)
    async with writing(first) as written:
        reading = reader.transaction(readonly=True)
        await reading.start()
        for name in OF_THE_FIRST_RELEASE:
            await reader.fetch(f"SELECT * FROM babylon.{name} LIMIT 1")
        upgrade = asyncio.create_task(migrate(parse_url(first)))
        await asyncio.sleep(2.5)
        assert not upgrade.done()  # it waits for the reader, again and again
        await reading.rollback()
        await upgrade
        assert await current_revision(reader) == "9002"
        before = dict(written)
        async with asyncio.timeout(60):  # it writes afterwards too
            while not all(written[name] > before[name] for name in written):
                await asyncio.sleep(0.01)
    for name, rows in written.items():
        count = await reader.fetchval(f"SELECT count(*) FROM babylon.{name}")
        assert count >= 2000 + rows, name
    assert await reader.fetchval(
        "SELECT indisvalid FROM pg_index WHERE indexrelid = 'babylon.calls_newest'::regclass"
    )
    await reader.close()


async def test_a_reader_that_never_ends_is_named_and_nothing_is_half_done(
    first: str, newer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate_module, "PATIENCE_S", 1.0)
    reader = await asyncpg.connect(first)
    async with reader.transaction(readonly=True):
        await reader.fetch("SELECT * FROM babylon.windows LIMIT 1")
        with pytest.raises(DatabaseError, match=r"did not get its locks .* pg_stat_activity"):
            await migrate(parse_url(first))
    assert await reader.fetchval(
        "SELECT count(*) FROM pg_attribute WHERE attname = 'newest' AND attnum > 0"
    ) in (0, None)
    await migrate(parse_url(first))
    assert await current_revision(reader) == "9002"
    await reader.close()


async def test_an_index_that_was_interrupted_is_built_again(first: str, newer: None) -> None:
    await migrate(parse_url(first), "9001")
    connection = await asyncpg.connect(first)
    await connection.execute("CREATE INDEX calls_newest ON babylon.calls_first (newest)")
    await connection.execute(
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'babylon.calls_newest'::regclass"
    )
    await migrate(parse_url(first))
    assert await connection.fetchval(
        "SELECT indisvalid FROM pg_index WHERE indexrelid = 'babylon.calls_newest'::regclass"
    )
    await connection.close()


async def test_the_way_back_is_the_backup_from_before_the_upgrade(
    first: str, postgres: EmbeddedPostgres | OtherPostgres, tmp_path: Path, newer: None
) -> None:
    """The upgraded database is left, and the backup goes into an empty one, at its own version:
    the first release's program reads it, and an upgrade of it loses no row either."""
    backup = tmp_path / "backup"
    backup.mkdir()
    connection = await asyncpg.connect(first)
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        tables = await write_tables(connection, backup / TABLES, with_game=False)
    await connection.close()
    manifest = Manifest(
        **{"format": FORMAT, "version": "0.1.0", "revision": FIRST, "ours": True, "postgres": "16"},
        taken_at=datetime.now(UTC),
        tables=tables,
        files={f"{TABLES}/{file.name}": sha256(file) for file in (backup / TABLES).iterdir()},
    )
    (backup / MANIFEST).write_bytes(msgspec.json.encode(asdict(manifest)))
    address = parse_url(first)
    await migrate(address)
    rows = await _rows(first)
    with pytest.raises(DatabaseError, match="is at version 9002, the backup at 0001"):
        await restore(DatabaseSettings(url=first), Home(tmp_path / "home"), backup)
    async for back in fresh_database(postgres, "template0"):
        await migrate(parse_url(back), FIRST)  # by the first release's own restore
        await _fill(parse_url(back), backup / TABLES, manifest)
        assert await _rows(back) == rows
    async for again in fresh_database(postgres, "template0"):
        await restore(DatabaseSettings(url=again), Home(tmp_path / "again"), backup)
        assert await _rows(again) == rows
        connection = await asyncpg.connect(again)
        assert await current_revision(connection) == "9002"
        await connection.close()


async def _rows(url: str) -> dict[str, int]:
    connection = await asyncpg.connect(url)
    counts = {
        name: await connection.fetchval(f"SELECT count(*) FROM babylon.{name}")
        for name in OF_THE_FIRST_RELEASE.keys() - {"gateways"}  # these are not backed up
    }
    await connection.close()
    assert all(counts.values())
    return counts
