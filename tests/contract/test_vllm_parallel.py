"""Tensor and data parallel servers by ``VLLM_ARGS``: adapters come while both ranks answer."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.contract.checkpoints import CONTEXT, Checkpoints
from tests.contract.engines import (
    VLLM_PYTHON,
    EngineUnderTest,
    host_settings,
    open_engine,
    running_host,
)
from tests.contract.test_engines import TOLERANCE, distance

pytestmark = pytest.mark.skipif(VLLM_PYTHON is None, reason="needs `make test-vllm`")
CLIENTS, CALLS = 4, 6
ARGS = f"--dtype float32 --enforce-eager --max-model-len {CONTEXT}"


@pytest.fixture(scope="module", params=["--tensor-parallel-size 2", "--data-parallel-size 2"])
def host_url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    home = tmp_path_factory.mktemp("home")
    settings = host_settings(home, Path(), vllm_args=f"{ARGS} {request.param}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # else each rank wants a NUMA node
        with running_host(settings) as url:
            yield url


@pytest.fixture
async def host(host_url: str) -> AsyncIterator[EngineUnderTest]:
    async for engine in open_engine(host_url):
        yield engine


async def test_adapters_loaded_under_load_answer_on_every_rank(
    host: EngineUnderTest, checkpoints: Checkpoints
) -> None:
    paths = {"babylon-v0": checkpoints.base}
    await host.load("babylon-v0", checkpoints.base)

    async def client(name: str) -> None:
        for seed in range(CALLS):
            answer = await host.chat(name, seed=seed)
            assert distance(answer, paths[name]) < TOLERANCE, name
            assert all(distance(answer, paths[other]) > 0.1 for other in paths if other != name)

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client("babylon-v0"))
        for version, path in enumerate(checkpoints.adapters, 1):
            paths[name := f"babylon-v{version}"] = path
            await host.load(name, path)
            for _ in range(CLIENTS):  # more than one a rank
                group.create_task(client(name))
