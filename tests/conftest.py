"""Shared fixtures: one embedded Postgres for the whole run, one fresh database for each test."""

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import hypothesis
import pytest

from babylon.core.settings import Settings, load_settings
from babylon.store import Store, open_store
from babylon.store.address import connect_arguments
from babylon.store.embedded import EmbeddedPostgres
from babylon.store.migrate import migrate

# The same examples in every run: a red suite means that a change broke something.
# `--hypothesis-profile default --hypothesis-seed N` looks for new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `babylon` sets it; torch loads later
TEMPLATE = "migrated"
REAL_ROWS = Path(__file__).parent / "data" / "babylon"


def real_rows(name: str) -> list[dict[str, Any]]:
    """The real rows of one file: users, trajectories, llm_call_logs or market_outcomes."""
    return [json.loads(line) for line in (REAL_ROWS / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """A server that all workers of the run share, with a migrated database to copy from."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"{os.getpid()}")
    home = Path(tempfile.gettempdir()) / f"babylon-tests-{run}"
    home.mkdir(exist_ok=True)
    server = EmbeddedPostgres(home)
    server.acquire()
    try:
        asyncio.run(_make_template(server))
        yield server
    finally:
        if server.release():
            shutil.rmtree(home)


@pytest.fixture
async def blank_database_url(postgres: EmbeddedPostgres) -> AsyncIterator[str]:
    """An empty database of this test's own."""
    async for url in fresh_database(postgres, "template0"):
        yield url


@pytest.fixture
async def database_url(postgres: EmbeddedPostgres) -> AsyncIterator[str]:
    """A migrated database of this test's own; the game's tables are ours, and empty."""
    async for url in fresh_database(postgres, TEMPLATE):
        yield url


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> Settings:
    """Defaults, on this test's database and an empty home."""
    return load_settings(database={"url": database_url}, home=tmp_path / "home")


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[Store]:
    async with open_store(settings) as store:
        yield store


async def _make_template(server: EmbeddedPostgres) -> None:
    connection = await asyncpg.connect(server.url("postgres"))
    try:
        await connection.execute("SELECT pg_advisory_lock(1)")
        if await connection.fetchval("SELECT true FROM pg_database WHERE datname = $1", TEMPLATE):
            return
        await connection.execute("ALTER SYSTEM SET fsync = off")
        await connection.execute("SELECT pg_reload_conf()")
        await connection.execute("CREATE DATABASE migrating")
        await migrate(connect_arguments(server.url("migrating")))
        await connection.execute(f"ALTER DATABASE migrating RENAME TO {TEMPLATE}")
    finally:
        await connection.close()


async def fresh_database(server: EmbeddedPostgres, template: str) -> AsyncIterator[str]:
    name = f"test_{uuid4().hex}"
    connection = await asyncpg.connect(server.url("postgres"))
    try:
        await connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
        yield server.url(name)
        await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        await connection.close()
