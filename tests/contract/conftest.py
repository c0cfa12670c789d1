import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.contract import double
from tests.contract.checkpoints import Checkpoints, make_checkpoints
from tests.contract.engines import (
    ENGINES,
    EngineUnderTest,
    host_settings,
    open_engine,
    running_embedded,
    running_host,
)

_numbers = count(2)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def vllm_double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return double.install(tmp_path_factory.mktemp("double"))


@pytest.fixture(scope="session", params=ENGINES)
def engine_url(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    vllm_double: Path,
    checkpoints: Checkpoints,
) -> Iterator[str]:
    """One engine for all tests: a name that was used once is never used again. It always has a
    model and an adapter, so that their servers stay."""
    settings = host_settings(tmp_path_factory.mktemp("home"), vllm_double)
    running_engine = running_embedded() if request.param == "embedded" else running_host(settings)
    with running_engine as url:
        asyncio.run(_load_first(url, checkpoints))
        yield url


async def _load_first(url: str, checkpoints: Checkpoints) -> None:
    async for engine in open_engine(url):
        await engine.load("policy-v0", checkpoints.base)
        await engine.load("policy-v1", checkpoints.adapters[3])


@pytest.fixture
async def engine(engine_url: str) -> AsyncIterator[EngineUnderTest]:
    async for engine in open_engine(engine_url):
        yield engine


@pytest.fixture
def name() -> str:
    return _new_name()


@pytest.fixture
async def base(engine: EngineUnderTest, checkpoints: Checkpoints) -> AsyncIterator[str]:
    """A full model under a name of this test's own."""
    name = await engine.load(_new_name(), checkpoints.base)
    yield name
    await engine.client.unload(name)


@pytest.fixture
async def adapters(
    engine: EngineUnderTest, checkpoints: Checkpoints
) -> AsyncIterator[dict[str, Path]]:
    """The first two adapters under names of this test's own."""
    names = {_new_name(): path for path in checkpoints.adapters[:2]}
    for name, path in names.items():
        await engine.load(name, path)
    yield names
    for name in names.keys() & (await engine.cards()).keys():
        await engine.client.unload(name)


def _new_name() -> str:
    return f"policy-v{next(_numbers)}"
