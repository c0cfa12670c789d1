"""Shared fixtures: one embedded Postgres for the whole run, one fresh database for each test."""

import asyncio
import fcntl
import gc
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import asyncpg
import hypothesis
import pytest

import babylon.core.openmp  # noqa: F401 - tests import torch themselves
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.store import Store, open_store
from babylon.store.address import parse_url
from babylon.store.embedded import EmbeddedPostgres
from babylon.store.migrate import migrate
from tests.guard import run_directory, start_guard
from tests.hub_double import TOKEN, HubState, serving_hub
from tests.other_postgres import OtherPostgres

# The same examples in every run: a red suite means that a change broke something.
# `--hypothesis-profile default --hypothesis-seed N` looks for new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

# Hundreds of processes, the workers among them, import the same modules: compile each module once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A judge of one small window has proved nothing. Tests of the proof ask for it.
os.environ.setdefault("JUDGE_EVIDENCE", "0")

TEMPLATE = "migrated"
MEMORY = Path("/dev/shm")
HERE = Path(__file__).parent
# `make test` leaves these out and `make test-slow` runs them: they start services as an operator
# does, kill them, run the commands of the docs, or train for many seconds.
SLOW_FOLDERS = ("contract", "docs", "faults", "hosts", "system")
SLOW = (
    "flows/test_loop.py",
    "flows/test_modes.py",
    "flows/test_prefect_outage.py",
    "flows/test_train_command.py",
    "integration/test_arena.py",
    "integration/test_art.py",
    "integration/test_checks.py",
    "integration/test_population.py",
    "integration/test_preferences.py",
    "integration/test_train_stage.py",
    "unit/evaluation/arena/test_match.py",
    "unit/evaluation/experiment/test_peeking.py",
    "unit/game/market/test_scripted.py",
    "unit/ops/test_doctor.py",
    "unit/policies/test_load.py",
    "unit/scoring/judge/test_money.py",
    "unit/serving/engine/test_running_batch.py",
    "unit/stages/test_tracking.py",
    "unit/training/grpo/test_bandit.py",
    "unit/training/grpo/test_forward.py",
    "unit/training/grpo/test_memory.py",
    "unit/training/grpo/test_prefix_tree.py",
    "unit/training/test_processes.py",
    "unit/training/test_resume.py",
    "unit/training/test_sft.py",
)
LONGEST_FIRST = (  # with its folder, where one worker runs that
    "flows/test_train_window.py",
    "docs/test_pages.py",
    "faults/test_crashes.py",
    "system/test_support_desk.py",
    "contract/test_engines.py",
    "unit/benchmarks/test_gpu_day.py",
    "system/test_up.py",
    "integration/test_checks.py",
    "faults/test_swaps.py",
    "system/test_serving_processes.py",
    "integration/test_arena.py",
    "unit/training/grpo/test_trainer.py",
    "integration/test_play.py",
    "integration/test_migrations.py",
    "integration/test_judge.py",
    "system/test_backup.py",
    "integration/test_publish.py",
    "integration/test_silent_database.py",
)
# The tests of each of these share what takes a worker ten seconds and more to make: a Prefect
# server, a played world and a server of forks, engines. One worker runs them all.
TOGETHER = re.compile(
    r"tests/(?:flows|contract|faults(?=/test_(?:crashes|deployments|outages|pauses|recorded|rows|workers)))/"
)
CRASHED: list[str] = []
REAL_ROWS = HERE / "data" / "babylon"
CAPTURED = REAL_ROWS.with_name("captured")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers are children of the process that has a guard
        start_guard([MEMORY, Path(tempfile.gettempdir())])


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark the slow tests, and put the longest files first, so that all workers end together."""
    rank = {HERE / name: number for number, name in enumerate(LONGEST_FIRST)}
    slow = {HERE / name for name in SLOW}
    assert all(path.is_file() for path in slow.union(rank)), slow.union(rank)
    for item in items:
        if item.path in slow or item.path.relative_to(HERE).parts[0] in SLOW_FOLDERS:
            item.add_marker(pytest.mark.slow)
    yield  # pytest deselects and orders by fixtures here
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Let a worker run whole files, and some folders, of ``--dist loadfile``."""
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = TOGETHER.match(nodeid)
            return folder[0] if folder else super()._split_scope(nodeid)

    return Together(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what all tests imported out of every later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep a test that ended its worker among the last failed.

    The worker's successor runs it again, and pytest takes it off the list if it passes there.
    """
    cache = getattr(session.config, "cache", None)
    if CRASHED and cache is not None:
        failed = cache.get("cache/lastfailed", {}) | dict.fromkeys(CRASHED, True)
        cache.set("cache/lastfailed", failed)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "???":  # how xdist reports the test during which a worker ended
        CRASHED.append(report.nodeid)


def real_rows(name: str) -> list[dict[str, Any]]:
    """The real rows of one file: users, trajectories, llm_call_logs or market_outcomes."""
    return [json.loads(line) for line in (REAL_ROWS / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres | OtherPostgres]:
    """A server that all workers of the run share, with a migrated database to copy from."""
    if programs := os.environ.get("TEST_POSTGRES"):
        other = OtherPostgres(Path(programs))
        with other.made(), other.running():
            asyncio.run(_make_template(other))
            yield other
        return
    home = run_directory(_fastest_directory())
    home.mkdir(exist_ok=True)
    server = EmbeddedPostgres(home)
    server.acquire()
    try:
        asyncio.run(_make_template(server))
        yield server
    finally:
        if server.release():
            shutil.rmtree(home)


def _fastest_directory() -> Path:
    """Memory if it has room for a thousand databases made and dropped: a disk takes ten times."""
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 * 2**30
    return MEMORY if roomy else Path(tempfile.gettempdir())


@pytest.fixture(scope="session")
def embedded_model(postgres: EmbeddedPostgres) -> Path:
    """A small embedded model after a part of its imitation: it knows the format.

    All workers share it. It lies beside the shared server, whose last user removes both.
    """
    from babylon.training.base_model import EmbeddedModelRecipe, make_embedded_model

    recipe = EmbeddedModelRecipe(hidden_size=64, layers=2, heads=2, steps=100, tokenizer_chats=500)
    with (postgres.home / "model.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return make_embedded_model(recipe, postgres.home / "models")


@pytest.fixture
async def blank_database_url(postgres: EmbeddedPostgres | OtherPostgres) -> AsyncIterator[str]:
    """An empty database of this test's own."""
    async for url in fresh_database(postgres, "template0"):
        yield url


@pytest.fixture
async def database_url(postgres: EmbeddedPostgres | OtherPostgres) -> AsyncIterator[str]:
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


async def _make_template(server: EmbeddedPostgres | OtherPostgres) -> None:
    connection = await asyncpg.connect(server.url("postgres"))
    try:
        await connection.execute("SELECT pg_advisory_lock(1)")
        if await connection.fetchval("SELECT true FROM pg_database WHERE datname = $1", TEMPLATE):
            return
        await connection.execute("ALTER SYSTEM SET fsync = off")
        await connection.execute("SELECT pg_reload_conf()")
        await connection.execute("CREATE DATABASE migrating")
        await migrate(parse_url(server.url("migrating")))
        await connection.execute(f"ALTER DATABASE migrating RENAME TO {TEMPLATE}")
    finally:
        await connection.close()


async def fresh_database(
    server: EmbeddedPostgres | OtherPostgres, template: str
) -> AsyncIterator[str]:
    name = f"test_{uuid4().hex}"
    connection = await asyncpg.connect(server.url("postgres"))
    try:
        strategy = "STRATEGY file_copy" if connection.get_server_version().major > 14 else ""
        await connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} {strategy}")
        yield server.url(name)
        await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        await connection.close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubState]:
    """A loopback hub. The client uploads by LFS, and waits for no repetition."""
    import huggingface_hub.constants

    from babylon.dataset import hub as hub_module

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    # Not `time.sleep` itself: Prefect has threads that would never rest.
    restless = SimpleNamespace(**vars(time) | {"sleep": lambda _: None})
    monkeypatch.setattr(hub_module, "time", restless)
    monkeypatch.setattr("huggingface_hub.utils._http.time", restless)
    with serving_hub() as state:
        yield state


@pytest.fixture
def publisher(settings: Settings, hub: HubState) -> Settings:
    """Settings that publish to the loopback hub."""
    return settings.replace(
        publish={
            "repository": "owner/play",
            "license": "cc-by-4.0",
            "agents": "*",
            "token": TOKEN,
            "endpoint": hub.url,
        }
    )
