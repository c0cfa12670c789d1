"""The SQLite of ``babylon up``'s Prefect server: writers wait for each other, none fails."""

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa
from prefect.server.database.configurations import AioSqliteConfiguration
from sqlalchemy.exc import OperationalError

from babylon.flows.prefect_server import TakesTurns

WRITERS, ROUNDS = 8, 5


async def count_together(configuration: AioSqliteConfiguration) -> int:
    """Every writer reads a number, lets the others run, and writes it back plus one."""
    engine = await configuration.engine()
    async with engine.begin() as connection:
        await connection.execute(sa.text("CREATE TABLE counter AS SELECT 0 AS n"))

    async def write() -> None:
        for _ in range(ROUNDS):
            session = await configuration.session(engine)
            async with session, configuration.begin_transaction(session):
                number = await session.scalar(sa.text("SELECT n FROM counter"))
                await asyncio.sleep(0.001)
                await session.execute(sa.text("UPDATE counter SET n = :n"), {"n": number + 1})

    await asyncio.gather(*[write() for _ in range(WRITERS)])
    async with engine.connect() as connection:
        return int(await connection.scalar(sa.text("SELECT n FROM counter")) or 0)


async def test_concurrent_transactions_wait_for_their_turn(tmp_path: Path) -> None:
    configuration = TakesTurns(connection_url=f"sqlite+aiosqlite:///{tmp_path}/prefect.db")
    assert await count_together(configuration) == WRITERS * ROUNDS


async def test_prefects_own_transactions_do_not(tmp_path: Path) -> None:
    """When this fails, Prefect has repaired it: delete ``flows/prefect_server.py``."""
    url = f"sqlite+aiosqlite:///{tmp_path}/prefect.db"
    with pytest.raises(OperationalError, match="database is locked"):
        await count_together(AioSqliteConfiguration(connection_url=url))
