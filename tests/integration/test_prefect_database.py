"""Prefect's own database, in the server of ours."""

from dataclasses import replace
from uuid import uuid4

import asyncpg
import pytest

from babylon.core.errors import DatabaseError
from babylon.ops.up.prefect_setup import PREFECT_DATABASE, prefect_database
from babylon.store import Store


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PREFECT_DATABASE, raising=False)


async def test_it_is_made_once_and_takes_the_index_that_prefect_needs(
    store: Store, database_url: str
) -> None:
    url = await prefect_database(store, f"{database_url}?sslmode=disable&schema=public")
    assert url == await prefect_database(store, f"{database_url}?sslmode=disable")
    assert url == f"{database_url}_prefect?ssl=disable".replace("://", "+asyncpg://", 1)
    connection = await asyncpg.connect(f"{database_url}_prefect")
    await connection.execute("CREATE EXTENSION pg_trgm")
    await connection.close()
    await store.pool.execute(f'DROP DATABASE "{url.rpartition("/")[2].partition("?")[0]}"')


async def test_a_prefect_database_of_ones_own_is_used(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PREFECT_DATABASE, "postgresql+asyncpg://elsewhere/prefect")
    assert await prefect_database(store, "postgresql://x/y") == (
        "postgresql+asyncpg://elsewhere/prefect"
    )


async def test_an_account_that_may_not_create_it_is_told_what_to_do(
    store: Store, database_url: str
) -> None:
    """A pool whose every session acts as an account without rights."""
    role = f"role_{uuid4().hex}"
    await store.pool.execute(f"CREATE ROLE {role}")
    try:
        options = {"role": role}
        async with asyncpg.create_pool(database_url, min_size=1, server_settings=options) as pool:
            with pytest.raises(DatabaseError, match=f"_prefect for Prefect.*{PREFECT_DATABASE}"):
                await prefect_database(replace(store, pool=pool), database_url)
    finally:
        await store.pool.execute(f"DROP ROLE {role}")
