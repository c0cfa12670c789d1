"""A database that falls silent: nothing waits for it longer than its limit, and all heals."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from babylon.core.errors import DatabaseError, FencedError
from babylon.core.settings_loading import load_settings
from babylon.core.windows import parse_window_id
from babylon.stages.claim import claimed
from babylon.store import open_store
from babylon.store.windows import claim_window, get_window, hold_lease
from tests.leases import until_renewed
from tests.silent_relay import SilentRelay

CLIENT = """
import asyncio, sys, time
from pathlib import Path
from babylon.core.errors import FencedError
from babylon.core.settings_loading import load_settings
from babylon.core.windows import parse_window_id
from babylon.stages.claim import claimed
from babylon.store import open_store

async def main(url, home, lease_s, seconds):
    settings = load_settings(database={"url": url}, home=Path(home), windows={"lease_s": lease_s})
    window = parse_window_id("2025-01-01T00:00", 60)
    ends = time.monotonic() + seconds
    try:
        async with open_store(settings) as store, claimed(store, settings.windows, window):
            while time.monotonic() < ends:
                await store.pool.fetchval("SELECT 1")
                last = time.monotonic()
                print("inside", flush=True)
                await asyncio.sleep(0.1)
        print("done", flush=True)
    except FencedError as error:
        print(f"lost after {time.monotonic() - last:.1f} s: {error}", flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])))
"""
WINDOW = parse_window_id("2025-01-01T00:00", 60)
LEASE_S = 4.0
HERE, THERE = "10.213.7.1", "10.213.7.2"


@pytest.mark.parametrize("work", ["in a query", "in a transaction", "beside the database"])
async def test_a_run_ends_within_two_leases_and_the_next_one_works(
    work: str, database_url: str, tmp_path: Path
) -> None:
    with SilentRelay(database_url) as relay:
        settings = load_settings(
            database={"url": relay.url}, home=tmp_path, windows={"lease_s": LEASE_S}
        )
        async with asyncio.timeout(2 * LEASE_S + 60) as limit:
            with pytest.raises(FencedError, match="could not renew its lease of 4 s"):
                async with (
                    open_store(settings) as store,
                    claimed(store, settings.windows, WINDOW),
                ):
                    relay.silence()
                    limit.reschedule(asyncio.get_running_loop().time() + 2 * LEASE_S)
                    if work == "beside the database":
                        await asyncio.sleep(60)
                    async with store.pool.acquire() as connection:
                        if work == "in a query":
                            await connection.fetchval("SELECT 1")
                        async with connection.transaction():
                            await connection.fetchval("SELECT 1")
        relay.wake()
        async with open_store(settings) as store:
            row = await get_window(store, WINDOW.id)
            assert row is not None
            await asyncio.sleep(LEASE_S if row.leased else 0)
            claim = await claim_window(store, WINDOW, owner="another", lease_s=LEASE_S)
            assert claim.epoch == row.epoch + 1


async def test_a_query_and_a_connection_have_limits(database_url: str, tmp_path: Path) -> None:
    with SilentRelay(database_url) as relay:
        url = f"{relay.url}?socket_timeout=1&connect_timeout=1"
        async with open_store(load_settings(database={"url": url}, home=tmp_path)) as store:
            await store.pool.fetchval("SELECT 1")
            relay.silence()
            with pytest.raises(DatabaseError, match=r"gave no answer in time: .*socket_timeout"):
                await store.pool.fetchval("SELECT 1")
            with pytest.raises(DatabaseError, match="no database answers at"):
                await store.pool.fetchval("SELECT 1")
            relay.wake()
            assert await store.pool.fetchval("SELECT 1") == 1


async def test_a_cancelled_query_returns_although_nobody_answers(
    database_url: str, tmp_path: Path
) -> None:
    """Long before the limit of a query, a minute, for which the driver would wait."""
    with SilentRelay(database_url) as relay:
        async with open_store(load_settings(database={"url": relay.url}, home=tmp_path)) as store:

            async def work() -> None:
                async with store.pool.acquire() as connection, connection.transaction():
                    relay.silence()
                    await connection.fetchval("SELECT 1")

            task = asyncio.create_task(work())
            await asyncio.sleep(1)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=15)
            relay.wake()
            assert done
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_a_cancelled_query_of_a_working_database_keeps_the_connection(
    database_url: str, tmp_path: Path
) -> None:
    settings = load_settings(database={"url": database_url}, home=tmp_path)
    async with open_store(settings) as store, store.pool.acquire() as connection:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2), connection.transaction():
                await connection.fetchval("SELECT pg_sleep(60)")
        assert await connection.fetchval("SELECT 1") == 1


async def test_a_short_silence_does_no_harm(database_url: str, tmp_path: Path) -> None:
    with SilentRelay(database_url) as relay:
        settings = load_settings(database={"url": relay.url}, home=tmp_path)
        async with open_store(settings) as store:
            claim = await claim_window(store, WINDOW, owner="one", lease_s=6)
            async with hold_lease(store, claim, 6):
                relay.silence()
                await asyncio.sleep(2.5)  # the renewal after 2 s waits
                relay.wake()
                await until_renewed(store)
            row = await get_window(store, WINDOW.id)
            assert row is not None and row.leased


@pytest.fixture
def link() -> Iterator[str]:
    """A network namespace, named as the fixture's value, that reaches us at HERE."""
    name = f"babylon{os.getpid()}"
    commands = [
        f"ip netns add {name}",
        f"ip link add {name[-9:]}v type veth peer name {name[-9:]}w netns {name}",
        f"ip addr add {HERE}/30 dev {name[-9:]}v",
        f"ip link set {name[-9:]}v up",
        f"ip -n {name} addr add {THERE}/30 dev {name[-9:]}w",
        f"ip -n {name} link set {name[-9:]}w up",
    ]
    try:
        for command in commands:
            try:
                subprocess.run(command.split(), check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                pytest.skip(f"needs the right to `{command}`")
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


async def test_a_link_that_loses_every_packet_ends_the_run_and_the_next_one_works(
    link: str, database_url: str, tmp_path: Path
) -> None:
    """The client's packets arrive and no answer comes back, also none to a new connection."""
    lost = ["ip", "route", "add", "blackhole", f"{THERE}/32"]
    with SilentRelay(database_url, HERE) as relay:

        def client(seconds: int) -> list[str]:
            program = [sys.executable, "-c", CLIENT, relay.url, str(tmp_path), str(LEASE_S)]
            return ["ip", "netns", "exec", link, *program, str(seconds)]

        process = await asyncio.create_subprocess_exec(*client(60), stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"inside\n"
        subprocess.run(lost, check=True)
        try:
            said = (await process.communicate())[0].decode().splitlines()[-1]
        finally:
            subprocess.run([*lost[:2], "del", *lost[3:]], check=True)
        match = re.fullmatch(r"lost after ([\d.]+) s: .* could not renew its lease of 4 s .*", said)
        assert match and float(match[1]) < 2 * LEASE_S, said
        again = await asyncio.create_subprocess_exec(*client(0), stdout=subprocess.PIPE)
        assert (await again.communicate())[0].decode() == "done\n"
