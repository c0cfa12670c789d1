"""A gateway of several processes: one address, and each process a gateway of its own."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from babylon.core.api_keys import local_key
from babylon.core.settings import Settings
from babylon.serving.gateway.worker_metrics import merged
from babylon.serving.serve import Serving, serving
from babylon.store import Store
from babylon.store.calls import wait_until_recorded
from babylon.store.gateways import GatewayRow, live_gateways, wait_for_acks
from babylon.store.routes import commit_route, current_route
from tests.integration.test_serving import openai_client, register
from tests.ports import free_port
from tests.system.test_serving_processes import ask, more_than
from tests.tiny_policy import save_tiny_policy

PROCESSES, AGENTS = 2, 8


@asynccontextmanager
async def running(store: Store, settings: Settings, tmp_path: Path) -> AsyncIterator[Serving]:
    """Two processes before an engine with two policies."""
    await register(store, [save_tiny_policy(tmp_path / f"v{seed}", seed) for seed in range(2)])
    environment = settings.environment()
    async with asyncio.timeout(600), serving(settings.serving, settings.home, environment) as found:
        yield found


@pytest.fixture
def settings(settings: Settings) -> Settings:
    endpoint = f"http://localhost:{free_port()}"
    given = {"endpoint": endpoint, "engine_port": free_port(), "workers": PROCESSES}
    return settings.replace(serving=given)


async def rows(store: Store) -> list[GatewayRow]:
    """Wait until each process has its row."""
    while len(found := await live_gateways(store)) != PROCESSES:
        await asyncio.sleep(0.05)
    return found


async def calls_by_worker(url: str, key: str) -> dict[str, float]:
    """The calls that each process counts; asks the shared address."""
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/metrics")).status_code == 401
        text = (await http.get("/metrics", headers=headers)).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "babylon_calls_total":
                worker = sample.labels["worker"]
                found[worker] = found.get(worker, 0) + sample.value
            if sample.name == "babylon_gateway_workers":
                assert sample.value == PROCESSES
    return found


async def test_each_process_answers_follows_and_records(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    url, key = settings.serving.endpoint, str(local_key(settings.home.root))
    async with running(store, settings, tmp_path), AsyncExitStack() as stack:
        found = await rows(store)
        assert len({row.url for row in found}) == PROCESSES
        assert url not in {row.url for row in found}
        answered = []
        while len(await calls_by_worker(url, key)) < PROCESSES:  # the kernel chooses by connection
            client = await stack.enter_async_context(openai_client(url, settings))
            answered.append(await ask(client, max_tokens=4))
        assert sum((await calls_by_worker(url, key)).values()) == len(answered)

        route = await current_route(store)
        version = await commit_route(
            store,
            policy_version=1,
            author="test",
            reason="test",
            expected_route_version=route.route_version,
        )
        acknowledged = await wait_for_acks(store, version, 1, timeout_s=30)
        assert {*acknowledged} == {row.gateway_id for row in found}
        for row in found:
            client = await stack.enter_async_context(openai_client(row.url, settings))
            answer = await client.chat.completions.create(
                model="babylon", messages=[{"role": "user", "content": "hello"}], max_tokens=4
            )
            assert answer.model == "babylon-v1"
            answered.append(answer.id)
        await wait_until_recorded(store)
    recorded = await store.pool.fetch("SELECT call_id FROM babylon.calls")
    assert sorted(row["call_id"] for row in recorded) == sorted(answered)
    assert not await live_gateways(store)
    assert not list(settings.home.recording.iterdir())


async def test_a_killed_process_costs_its_own_calls_only_and_is_replaced(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    answered: list[str] = []
    errors: list[Exception] = []
    done = asyncio.Event()

    async def agent(client: AsyncOpenAI) -> None:
        while not done.is_set():
            try:
                answered.append(await ask(client, max_tokens=20))
            except (openai.APIError, httpx.TransportError) as error:
                errors.append(error)
                await asyncio.sleep(0.05)

    async with running(store, settings, tmp_path) as found, AsyncExitStack() as stack:
        before = {row.gateway_id for row in await rows(store)}
        clients = [openai_client(settings.serving.endpoint, settings) for _ in range(AGENTS)]
        for client in clients:
            await stack.enter_async_context(client)
        playing = [asyncio.create_task(agent(client)) for client in clients]
        for one in playing:
            stack.callback(one.cancel)
        for gateway in found.gateways:
            await more_than(answered, 2 * AGENTS)
            killed = gateway.pid
            os.kill(killed, signal.SIGKILL)
            await more_than(answered, AGENTS)  # of the other process, meanwhile
            while (after := {row.gateway_id for row in await rows(store)}) == before:
                await asyncio.sleep(0.05)  # the replacement removes the row, and writes its own
            assert len(before & after) == PROCESSES - 1
            before = after
        await more_than(answered, 2 * AGENTS)
        done.set()
        await asyncio.gather(*playing)
        await wait_until_recorded(store)
    # A process that starts takes no call before it can serve, so that no call is refused.
    assert not [error for error in errors if isinstance(error, openai.APIStatusError)], errors
    assert len(errors) <= 2 * AGENTS
    recorded = await store.pool.fetch("SELECT call_id FROM babylon.calls WHERE trainable")
    ids = [row["call_id"] for row in recorded]
    assert {*answered} <= {*ids}
    assert len({*ids}) == len(ids)


def test_merged_metrics_name_the_process_and_are_not_added_up() -> None:
    one = '# HELP c_total Calls.\n# TYPE c_total counter\nc_total{arm="a"} 2.0\n'
    more = "# HELP up Up.\n# TYPE up gauge\nup 1.0\n"
    text = merged({"1": one, "2": one + more}).decode()
    assert text.count("# TYPE c_total counter") == 1
    assert 'c_total{arm="a",worker="1"} 2.0' in text
    assert 'c_total{arm="a",worker="2"} 2.0' in text
    assert 'up{worker="2"} 1.0' in text
