"""PgBouncer in session and in transaction mode: the real program, with fewer sessions than clients.

Version 1.18 knows no prepared statements in transaction mode, and each version refuses parameters
at the start of a session that it does not know.
"""

from pathlib import Path

import asyncpg
import pytest

from babylon.core.settings_loading import load_settings
from babylon.core.windows import parse_window_id
from babylon.store import database_status, open_store
from babylon.store.calls import insert_calls
from babylon.store.migrate import HEAD
from babylon.store.routes import CHANNEL
from babylon.store.windows import claim_window, get_window, hold_lease
from tests.leases import until_renewed
from tests.pgbouncer import Mode, needs_pgbouncer, pgbouncer, run_clients
from tests.unit.serving.gateway.calls import call

pytestmark = needs_pgbouncer
QUERIES = 250
CLIENT = """
import asyncio, sys
from pathlib import Path
from babylon.core.settings_loading import load_settings
from babylon.store import open_store
from babylon.store.session import in_batches

async def main():
    number, url, home, queries = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    async with open_store(load_settings(database={"url": url}, home=home)) as store:
        done = 0
        async def one(index):
            nonlocal done
            key = f"{number}-{index}"
            kind = index % 5
            if kind == 0:
                async with store.pool.acquire() as c, c.transaction(isolation="repeatable_read"):
                    sums = 0
                    query = "SELECT n FROM generate_series(1, $1::int) n"
                    async for rows in in_batches(c, query, 25, size=10):
                        sums += sum(row[0] for row in rows)
                    assert sums == 325
            elif kind == 1:
                await store.pool.execute("INSERT INTO babylon.windows (window_id, minutes, metrics)"
                                         " VALUES ($1, $2, $3)", key, 60, {"number": number})
                read = await store.pool.fetchval("SELECT metrics FROM babylon.windows"
                                                 " WHERE window_id = $1", key)
                assert read == {"number": number}
            elif kind == 2:
                zone, path = await store.pool.fetchrow(
                    "SELECT current_setting('timezone'), current_setting('search_path')")
                assert (zone, path) == ("UTC", 'public'), (zone, path)
            elif kind == 3:
                async with store.pool.acquire() as c, c.transaction():
                    await c.copy_records_to_table("collected", schema_name="babylon",
                        columns=("window_id", "trajectory_id"),
                        records=[(key, str(n)) for n in range(9)])
                assert 9 == await store.pool.fetchval(
                    "SELECT count(*) FROM babylon.collected WHERE window_id = $1", key)
            else:
                await store.pool.executemany(
                    "INSERT INTO babylon.late (trajectory_id, window_id, reason)"
                    " VALUES ($1, $2, '') ON CONFLICT DO NOTHING", [("a", "b"), ("c", "d")])
                assert await store.pool.fetch("SELECT count(*) FROM trajectories")
            done += 1
        for start in range(0, queries, 10):
            await asyncio.gather(*(one(i) for i in range(start, min(start + 10, queries))))
        print(done)

asyncio.run(main())
"""


@pytest.mark.parametrize("mode", ["session", "transaction"])
async def test_a_thousand_queries_of_four_clients(
    mode: Mode, database_url: str, tmp_path: Path
) -> None:
    size = 2 if mode == "transaction" else 50  # a session of the server for each connection
    async with pgbouncer(database_url, tmp_path, mode, size) as pooler:
        done = await run_clients(CLIENT, 4, pooler.url, str(tmp_path), str(QUERIES))
        assert [int(line) for line in done] == [QUERIES] * 4
        log = pooler.log.read_text()
    assert "unsupported startup parameter" not in log and "not linked" not in log, log


async def test_startup_settings_and_cursors_would_fail(database_url: str, tmp_path: Path) -> None:
    """The reason for the sessions of ``babylon.store.session``."""
    async with pgbouncer(database_url, tmp_path, "transaction", size=1) as pooler:
        with pytest.raises(asyncpg.PostgresError, match="unsupported startup parameter"):
            await asyncpg.connect(pooler.url, server_settings={"search_path": "public"})
        one, two = [await asyncpg.connect(pooler.url, statement_cache_size=9) for _ in range(2)]
        query = "SELECT 1 WHERE $1"
        assert await one.fetch(query, True)
        await two.execute("DEALLOCATE ALL")  # in the session that both share
        with pytest.raises(asyncpg.PostgresError, match="prepared statement"):
            await one.fetch(query, True)
        one.terminate()
        two.terminate()


@pytest.mark.parametrize("given", ["", "?pgbouncer=true&connection_limit=1&schema=public"])
async def test_a_database_is_migrated_and_used_through_a_pooler(
    given: str, blank_database_url: str, tmp_path: Path
) -> None:
    async with pgbouncer(blank_database_url, tmp_path, "transaction") as pooler:
        settings = load_settings(database={"url": pooler.url + given}, home=tmp_path / "home")
        async with open_store(settings, migrate=True) as store:
            window = parse_window_id("2025-01-01T00:00", 60)
            claim = await claim_window(store, window, owner="a", lease_s=3)
            async with hold_lease(store, claim, 3):
                await until_renewed(store)
            row = await get_window(store, window.id)
            assert row is not None and row.leased
            for calls in ([call(1)], [call(1), call(2)]):  # the second through a temporary table
                await insert_calls(store, calls)
            assert await store.pool.fetchval("SELECT count(*) FROM babylon.calls") == 2
            async with store.pool.acquire() as connection:  # nothing to hear, and no error
                await connection.add_listener(CHANNEL, print)
                await connection.remove_listener(CHANNEL, print)
        status = await database_status(settings.database, settings.home)
        assert (status.revision, status.pooled, status.has_game_tables) == (HEAD, True, True)
