"""A connection that breaks in the middle of work: loops retry after its error."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import uvloop

from babylon.core.errors import DatabaseError
from babylon.core.settings_loading import load_settings
from babylon.ops.up.turns import setting_up
from babylon.store import Store, open_store
from babylon.store.connection import UNREACHABLE


def _on_the_gateways_loop(
    database_url: str, home: Path, work: Callable[[Store], Awaitable[None]]
) -> None:
    async def run() -> None:
        settings = load_settings(database={"url": database_url}, home=home)
        async with open_store(settings, migrate=True) as store:
            await work(store)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_a_copy_to_a_socket_that_just_closed_is_an_error_of_the_database(
    database_url: str, tmp_path: Path
) -> None:
    async def work(store: Store) -> None:
        async with store.pool.acquire() as connection:
            await connection.execute("CREATE TEMPORARY TABLE copied (at timestamptz)")
            rows = [(datetime.now(UTC),)]
            columns = ["at"]
            await connection.copy_records_to_table("copied", records=rows, columns=columns)

            async def source() -> AsyncIterator[bytes]:
                connection._con._transport.abort()  # type: ignore[attr-defined]
                await asyncio.sleep(0.1)
                yield b"2025-01-01\n"

            with pytest.raises(UNREACHABLE) as caught:
                await connection.copy_to_table("copied", source=source(), columns=columns)
            assert isinstance(caught.value, DatabaseError)
            assert "broke during a statement" in str(caught.value)
        assert await store.pool.fetchval("SELECT 1") == 1

    _on_the_gateways_loop(database_url, tmp_path, work)


def test_a_cancellation_is_not_lost_when_the_connection_breaks_too(
    database_url: str, tmp_path: Path
) -> None:
    async def work(store: Store) -> None:
        inside = asyncio.Event()

        async def hold() -> None:
            async with store.pool.acquire() as connection:
                await connection.execute("SELECT 1")
                inside.set()
                try:
                    await asyncio.sleep(60)
                finally:
                    connection._con._transport.abort()  # type: ignore[attr-defined]

        task = asyncio.create_task(hold())
        await inside.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), task.exception()
        assert await store.pool.fetchval("SELECT 1") == 1

    _on_the_gateways_loop(database_url, tmp_path, work)


async def test_a_turn_that_breaks_while_prefect_answers_is_an_error_of_the_database(
    store: Store,
) -> None:
    with pytest.raises(DatabaseError, match="broke while Prefect was set up"):
        async with setting_up(store):
            (holding,) = [one._con for one in store.pool._holders if one._in_use]  # type: ignore[attr-defined]
            holding._transport.abort()
            while not holding.is_closed():
                await asyncio.sleep(0)
