"""The host of vLLM servers beyond the contract: it starts them, one a model, brings back
what they lose, and stops them when nobody needs them."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from babylon.core.errors import ServingError
from babylon.core.processes import lives
from babylon.serving.gateway.engine_client import EngineDownError
from babylon.serving.gateway.engine_connections import EngineResponse
from tests.contract.checkpoints import Checkpoints
from tests.contract.engines import (
    HELLO,
    PATIENCE_S,
    VLLM_PYTHON,
    EngineUnderTest,
    asked,
    host_settings,
    open_engine,
    running_host,
)
from tests.contract.test_engines import TOLERANCE, assert_aligned, distance


@pytest.fixture(scope="module")
def host_url(tmp_path_factory: pytest.TempPathFactory, vllm_double: Path) -> Iterator[str]:
    with running_host(host_settings(tmp_path_factory.mktemp("home"), vllm_double)) as url:
        yield url


@pytest.fixture
async def host(host_url: str) -> AsyncIterator[EngineUnderTest]:
    async for engine in open_engine(host_url):
        yield engine


def family(url: str) -> list[psutil.Process]:
    """The processes of the vLLM server at this address, its API server first."""
    port = url.rpartition(":")[2]
    for process in psutil.Process().children(recursive=True):
        if process.status() == psutil.STATUS_ZOMBIE:
            continue
        command = process.cmdline()
        if (
            port in command
            and "--model" in command
            and "babylon.serving.vllm.process_group" not in command
        ):
            return [process, *process.children(recursive=True)]
    raise AssertionError(f"no vLLM server at {url}")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.05)


async def begin_some(name: str, host: EngineUnderTest) -> list[EngineResponse]:
    """Streams, of which some are long."""
    return await asyncio.gather(
        *(host.begin(name, seed=seed, max_tokens=400) for seed in range(24))
    )


def gone(processes: list[psutil.Process]) -> bool:
    return not any(map(lives, processes))


async def test_base_and_adapter_share_a_server(
    host: EngineUnderTest, checkpoints: Checkpoints
) -> None:
    await host.load("babylon-v1", checkpoints.adapters[0])
    await host.load("babylon-v0", checkpoints.base)
    model, adapter = [(await host.cards())[name] for name in ("babylon-v0", "babylon-v1")]
    if not VLLM_PYTHON:  # on a CPU they stay apart
        assert model["url"] == adapter["url"]
        assert model["model"] == str(checkpoints.base)  # what the server calls it
    servers = (await host.health())["servers"]
    assert {server["url"] for server in servers} == {model["url"], adapter["url"]}
    for name, path in (("babylon-v0", checkpoints.base), ("babylon-v1", checkpoints.adapters[0])):
        answer = await host.chat(name)
        assert_aligned(answer)
        assert distance(answer, path) < TOLERANCE


async def test_nobody_else_of_the_machine_uses_host_or_server(
    host: EngineUnderTest, checkpoints: Checkpoints
) -> None:
    await host.load("babylon-v0", checkpoints.base)
    server = (await host.cards())["babylon-v0"]["url"]
    lora = {"lora_name": "x", "lora_path": str(checkpoints.adapters[0])}
    chat = asked(str(checkpoints.base), messages=HELLO)
    async with aiohttp.ClientSession() as stranger:
        for method, url, body in (
            ("PUT", f"{host.url}/policies/x", {"path": str(checkpoints.base), "version": 1}),
            ("DELETE", f"{host.url}/policies/babylon-v0", None),
            ("POST", f"{server}/v1/chat/completions", chat),
            ("POST", f"{server}/v1/load_lora_adapter", lora),
            ("GET", f"{server}/v1/models", None),
            ("POST", f"{server}/invocations", chat),
            ("POST", f"{server}/adapters", {"name": "x", "src": str(checkpoints.adapters[0])}),
            ("POST", f"{server}/tokenize", chat),
        ):
            for headers in ({}, {"Authorization": "Bearer guessed"}):
                async with stranger.request(method, url, json=body, headers=headers) as answer:
                    assert answer.status == 401, (method, url)
    assert (await host.chat("babylon-v0")).status == 200


async def test_full_weights_get_a_server_of_their_own(
    host: EngineUnderTest, checkpoints: Checkpoints
) -> None:
    await host.load("babylon-v2", checkpoints.other_base)
    before = [server["url"] for server in (await host.health())["servers"]][:-1]
    green = (await host.cards())["babylon-v2"]["url"]
    assert green not in before
    answer = await host.chat("babylon-v2")
    assert distance(answer, checkpoints.other_base) < TOLERANCE < distance(answer, checkpoints.base)
    processes = family(green)
    begun = await begin_some("babylon-v2", host)
    await host.client.unload("babylon-v2")
    assert "babylon-v2" not in await host.cards()
    for response in begun:
        assert (response.begun + await response.read()).endswith(b"data: [DONE]\n\n")
    await until(lambda: gone(processes))
    assert [server["url"] for server in (await host.health())["servers"]] == before
    assert (await host.chat("babylon-v0")).status == 200


async def test_model_that_does_not_start_is_refused_with_the_reason_and_leaves_nothing(
    host: EngineUnderTest, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    broken = shutil.copytree(checkpoints.other_base, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    before = (await host.health())["servers"]
    with pytest.raises(ServingError, match=r"does not start: .*Error: .*\(see .*vllm-\d+\.log\)"):
        await host.load("babylon-v3", broken)
    assert (await host.health())["servers"] == before
    assert (await host.chat("babylon-v0")).status == 200


async def test_a_killed_server_comes_back_with_its_policies(
    host: EngineUnderTest, checkpoints: Checkpoints
) -> None:
    held = {
        "babylon-v0": checkpoints.base,
        "babylon-v1": checkpoints.adapters[0],
        "babylon-v4": checkpoints.adapters[1],
    }
    for name, path in held.items():
        await host.load(name, path)
    processes = family((await host.cards())["babylon-v4"]["url"])
    begun = await begin_some("babylon-v4", host)
    os.kill(processes[0].pid, signal.SIGKILL)
    ends = await asyncio.gather(*(r.read() for r in begun), return_exceptions=True)
    assert {type(end) for end in ends} <= {bytes, ConnectionError}  # short ones are whole
    with pytest.raises(EngineDownError):
        await host.chat("babylon-v4")
    assert "babylon-v4" not in await host.cards()
    assert (await host.health())["status"] == "starting"
    await until(lambda: gone(processes))  # its workers would keep the GPU's memory

    async with asyncio.timeout(PATIENCE_S):
        while held.keys() > (listed := (await host.cards()).keys()):
            for name in listed:  # whatever is listed answers
                assert (await host.chat(name)).status == 200
            await asyncio.sleep(0.05)
    for name, path in held.items():
        assert distance(await host.chat(name), path) < TOLERANCE
    assert (await host.health())["status"] == "ok"


async def test_servers_end_with_their_host(host: EngineUnderTest, checkpoints: Checkpoints) -> None:
    await host.load("babylon-v0", checkpoints.base)
    processes = family((await host.cards())["babylon-v0"]["url"])
    leash = processes[0].parent()
    assert leash is not None
    os.kill(leash.ppid(), signal.SIGKILL)
    await until(lambda: gone([leash, *processes]))
