import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.contract import double
from tests.contract.checkpoints import Checkpoints, make_checkpoints
from tests.contract.engines import (
    ENGINES,
    Door,
    host_settings,
    open_door,
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
    engine = running_embedded() if request.param == "embedded" else running_host(settings)
    with engine as url:
        asyncio.run(_load_first(url, checkpoints))
        yield url


async def _load_first(url: str, checkpoints: Checkpoints) -> None:
    async for door in open_door(url):
        await door.load("policy-v0", checkpoints.base)
        await door.load("policy-v1", checkpoints.adapters[3])


@pytest.fixture
async def door(engine_url: str) -> AsyncIterator[Door]:
    async for door in open_door(engine_url):
        yield door


@pytest.fixture
def name() -> str:
    return _new_name()


@pytest.fixture
async def base(door: Door, checkpoints: Checkpoints) -> AsyncIterator[str]:
    """A full model under a name of this test's own."""
    name = await door.load(_new_name(), checkpoints.base)
    yield name
    await door.engine.unload(name)


@pytest.fixture
async def adapters(door: Door, checkpoints: Checkpoints) -> AsyncIterator[dict[str, Path]]:
    """The first two adapters under names of this test's own."""
    names = {_new_name(): path for path in checkpoints.adapters[:2]}
    for name, path in names.items():
        await door.load(name, path)
    yield names
    for name in names.keys() & (await door.cards()).keys():
        await door.engine.unload(name)


def _new_name() -> str:
    return f"policy-v{next(_numbers)}"
