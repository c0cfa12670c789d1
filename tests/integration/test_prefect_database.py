"""Prefect's own database, in the server of ours."""

from dataclasses import replace
from uuid import uuid4

import asyncpg
import pytest

from babylon.core.errors import DatabaseError
from babylon.ops.up.prefect_setup import PREFECT_DATABASE, _named, prefect_database
from babylon.store import Store
from babylon.store.address import parse_url


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PREFECT_DATABASE, raising=False)


async def test_it_is_made_once_and_takes_the_index_that_prefect_needs(
    store: Store, database_url: str
) -> None:
    named = await prefect_database(store, f"{database_url}?sslmode=disable&schema=public")
    assert named == await prefect_database(store, f"{database_url}?sslmode=disable")
    ((variable, url),) = named.items()
    assert variable == PREFECT_DATABASE
    assert url == f"{database_url}_prefect?ssl=disable".replace("://", "+asyncpg://", 1)
    connection = await asyncpg.connect(f"{database_url}_prefect")
    await connection.execute("CREATE EXTENSION pg_trgm")
    await connection.close()
    await store.pool.execute(f'DROP DATABASE "{url.rpartition("/")[2].partition("?")[0]}"')


async def test_a_prefect_database_of_ones_own_is_used(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PREFECT_DATABASE, "postgresql+asyncpg://elsewhere/prefect")
    assert await prefect_database(store, "postgresql://x/y") == {
        PREFECT_DATABASE: "postgresql+asyncpg://elsewhere/prefect"
    }


@pytest.mark.parametrize(
    ("ours", "its"),
    [
        ("u@/d?host=/run/own&port=6000", "u@/p?host=%2Frun%2Fown&port=6000"),
        ("u:p%40ss@/d", "u:p%40ss@/p"),
        ("/d?host=/run/own", "/p?host=%2Frun%2Fown&port=5432"),
        ("[::1]/d?user=u%40cloud&password=x", "[::1]:5432/p?user=u%40cloud&password=x"),
        ("/d?host=db&port=6000&sslmode=require", "db:6000/p?ssl=require"),
    ],
)
def test_it_is_where_ours_is(ours: str, its: str) -> None:
    named = _named(parse_url(f"postgresql://{ours}"), "p")
    assert named == {PREFECT_DATABASE: f"postgresql+asyncpg://{its}"}


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
