"""A vLLM server that runs already: adapters come and go there, and nothing else is touched."""

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from babylon.core.errors import ServingError
from babylon.serving.gateway.engine_client import EngineDownError
from babylon.serving.vllm.command import vllm_service
from tests.contract.checkpoints import Checkpoints
from tests.contract.engines import (
    VLLM_PYTHON,
    EngineUnderTest,
    host_settings,
    open_engine,
    running,
    running_host,
)
from tests.contract.test_engines import TOLERANCE, distance
from tests.ports import free_port


@dataclass(frozen=True)
class Existing:
    url: str
    home: Path
    double: Path


@contextmanager
def running_server(
    home: Path, double: Path, base: Path, environment: dict[str, str]
) -> Iterator[Existing]:
    """As an operator would start one, under a name of the operator's choice."""
    port = free_port()
    settings = host_settings(home, double)
    service = vllm_service(
        settings.serving, str(base), "ours", port, logs=settings.home.logs, secret=""
    )
    command = list(service.command)
    command = command[command.index("babylon.serving.vllm.process_group") + 1 :]
    if VLLM_PYTHON:  # without the guard of our own servers, and its key
        at = command.index("--middleware")
        command = command[2:at] + command[at + 2 :]
    with running(command, f"http://127.0.0.1:{port}", environment):
        yield Existing(f"http://127.0.0.1:{port}", home, double)


@pytest.fixture(scope="module")
def existing(
    tmp_path_factory: pytest.TempPathFactory, vllm_double: Path, checkpoints: Checkpoints
) -> Iterator[Existing]:
    allowed = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    home = tmp_path_factory.mktemp("home")
    with running_server(home, vllm_double, checkpoints.base, allowed) as server:
        yield server


async def opened(existing: Existing) -> AsyncIterator[EngineUnderTest]:
    """A host for that server, and the client of it."""
    settings = host_settings(existing.home, existing.double, engine_url=existing.url)
    with running_host(settings) as url:
        async for engine in open_engine(url):
            yield engine


async def test_adapters_stay_on_an_existing_server_when_the_host_ends(
    existing: Existing, checkpoints: Checkpoints
) -> None:
    held = {"babylon-v0": checkpoints.base, "babylon-v1": checkpoints.adapters[0]}
    async for host in opened(existing):
        for name, path in held.items():
            await host.load(name, path)
            assert distance(await host.chat(name), path) < TOLERANCE
        cards = await host.cards()
        assert {card["url"] for card in cards.values()} == {existing.url}
        assert cards["babylon-v0"]["model"] == "ours"
    async for host in opened(existing):  # another one, which takes over what is there
        assert await host.cards() == {}
        status, body = await host.put("babylon-v1", checkpoints.adapters[1])
        assert status == 409
        assert str(checkpoints.adapters[0]) in body["error"]["message"]
        for name, path in held.items():
            await host.load(name, path)
        await host.client.unload("babylon-v1")
        answer = await host.chat("babylon-v1")
        assert answer.status == 404
        await host.client.unload("babylon-v0")
        async with host.http.get(f"{existing.url}/health") as response:
            assert response.status == 200


async def test_what_the_server_cannot_serve_is_refused_and_said(
    existing: Existing, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    foreign = shutil.copytree(checkpoints.adapters[0], tmp_path / "foreign")
    config = json.loads((foreign / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(checkpoints.other_base)
    (foreign / "adapter_config.json").write_text(json.dumps(config))
    async for host in opened(existing):
        for path in (checkpoints.other_base, foreign):
            with pytest.raises(ServingError, match=f"serves {checkpoints.base}") as refusal:
                await host.load("babylon-v2", path)
            assert str(path) in str(refusal.value)


async def test_a_stopped_server_is_no_refusal(existing: Existing, checkpoints: Checkpoints) -> None:
    nobody = Existing(f"http://127.0.0.1:{free_port()}", existing.home, existing.double)
    async for host in opened(nobody):
        assert (await host.health())["status"] == "starting"
        with pytest.raises(EngineDownError, match=nobody.url):
            await host.load("babylon-v0", checkpoints.base)
