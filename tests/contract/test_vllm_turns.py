"""Full models that take turns on one real vLLM server: its weights change while it runs."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random

import asyncpg
import pytest
import torch
from openai import AsyncOpenAI

from babylon.core.errors import ServingError
from babylon.core.settings import Settings
from babylon.store import Store
from babylon.store.calls import wait_until_recorded
from tests.contract.checkpoints import Checkpoints, trainer_logprobs
from tests.contract.engines import (
    HELLO,
    PATIENCE_S,
    SECRET,
    VLLM_PYTHON,
    EngineUnderTest,
    host_settings,
    open_engine,
    running_host,
)
from tests.contract.test_engines import TOLERANCE, distance
from tests.contract.test_vllm_host import begin_some, family
from tests.integration.test_serving import (
    openai_client,
    register,
    route_to,
    running_gateway,
    until_healthy,
)

pytestmark = pytest.mark.skipif(VLLM_PYTHON is None, reason="needs `make test-vllm`")
CLIENTS, CALLS = 8, 12


@pytest.fixture(scope="module")
def host_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = host_settings(tmp_path_factory.mktemp("home"), Path(), vllm_turns="true")
    with running_host(settings) as url:
        yield url


@pytest.fixture
async def host(host_url: str) -> AsyncIterator[EngineUnderTest]:
    async for engine in open_engine(host_url):
        yield engine


async def test_every_call_is_answered_by_its_own_weights_alone(
    host: EngineUnderTest, checkpoints: Checkpoints
) -> None:
    paths = {"babylon-v0": checkpoints.base, "babylon-v1": checkpoints.other_base}
    for name, path in paths.items():
        await host.load(name, path)
    assert len((await host.health())["servers"]) == 1
    processes = family((await host.health())["servers"][0]["url"])

    streams = await begin_some("babylon-v0", host)  # they run while another model is asked for
    other = asyncio.create_task(host.chat("babylon-v1"))
    for stream in streams:
        assert (stream.begun + await stream.read()).endswith(b"data: [DONE]\n\n")
    assert distance(await other, checkpoints.other_base) < TOLERANCE

    async def client(seed: int) -> None:  # all ask the same: a stale prefix would show
        random = Random(seed)
        for _ in range(CALLS):
            name, other_name = random.sample(list(paths), 2)
            answer = await host.chat(name, seed=random.randrange(1000))
            assert distance(answer, paths[name]) < TOLERANCE
            assert distance(answer, paths[other_name]) > TOLERANCE

    await asyncio.gather(*(client(seed) for seed in range(CLIENTS)))
    assert processes[0].is_running()
    counted = await host.send("babylon-v0", b'{"prompt": "hello"}', "/tokenize")
    assert counted.status == 200


async def test_a_model_that_does_not_load_is_refused_and_the_others_answer(
    host: EngineUnderTest, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    broken = shutil.copytree(checkpoints.other_base, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ServingError, match=f"{broken} cannot answer"):
        await host.load("babylon-v2", broken)
    assert "babylon-v2" not in await host.cards()
    assert distance(await host.chat("babylon-v0"), checkpoints.base) < TOLERANCE


async def test_a_killed_server_comes_back_with_all_of_them(
    host: EngineUnderTest, checkpoints: Checkpoints
) -> None:
    url = (await host.health())["servers"][0]["url"]
    os.kill(family(url)[0].pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while (await host.cards()).keys():
            await asyncio.sleep(0.05)
        while (await host.cards()).keys() < {"babylon-v0", "babylon-v1"}:
            await asyncio.sleep(0.2)
    assert distance(await host.chat("babylon-v1"), checkpoints.other_base) < TOLERANCE
    assert distance(await host.chat("babylon-v0"), checkpoints.base) < TOLERANCE


async def test_records_name_the_policy_whose_weights_answered_over_a_swap_and_a_rollback(
    store: Store, settings: Settings, host: EngineUnderTest, checkpoints: Checkpoints
) -> None:
    paths = [checkpoints.base, checkpoints.other_base]
    await register(store, paths)
    done = asyncio.Event()

    async def client(openai: AsyncOpenAI, stream: bool) -> None:
        asked = {"model": "babylon", "messages": HELLO, "max_tokens": 24, "stream": stream}
        while not done.is_set():
            answer = await openai.chat.completions.create(**asked)  # type: ignore[call-overload]
            if stream:
                assert [chunk async for chunk in answer][-1].choices[0].finish_reason

    settings.home.root.mkdir(exist_ok=True)
    (settings.home.root / "engine.key").write_text(SECRET)
    async with (
        running_gateway(store, settings, host.url) as url,
        openai_client(url, settings) as ai,
    ):
        await until_healthy(url, timeout_s=PATIENCE_S)
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(client(ai, stream=number % 2 == 0))
            for version in (1, 0, 1, 0):
                await asyncio.sleep(2)
                await route_to(store, version)
            await asyncio.sleep(2)
            done.set()
        await wait_until_recorded(store)
    rows = await store.pool.fetch("SELECT * FROM babylon.calls WHERE arm = 'champion'")
    assert {row["policy_version"] for row in rows} == {0, 1}
    for row in rows:
        assert row["trainable"], row["untrainable_reason"]
        assert off(row, paths[row["policy_version"]]) < TOLERANCE


def off(row: asyncpg.Record, path: Path) -> float:
    """Largest difference of a recorded logprob to that of a checkpoint."""
    prompt, sampled = row["prompt_token_ids"], row["completion_token_ids"]
    exact = trainer_logprobs(path, prompt, sampled, row["temperature"])
    return float((torch.tensor(row["logprobs"], dtype=torch.float64) - exact).abs().max())
