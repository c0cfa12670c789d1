"""Gateway and engine as agents see them: a real OpenAI client, real HTTP, a real Postgres."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import openai
import pytest
import torch
import uvicorn
from aiohttp.test_utils import TestServer
from openai import AsyncOpenAI

from babylon.core.api_keys import local_key
from babylon.core.errors import ServingError
from babylon.core.settings import Settings
from babylon.serving.engine.engine_process import make_app
from babylon.serving.gateway.app import open_gateway
from babylon.serving.gateway.http_guard import server_config
from babylon.store import Store, open_store
from babylon.store.calls import wait_until_recorded
from babylon.store.gateways import wait_for_acks
from babylon.store.policies import ensure_base
from babylon.store.routes import commit_route, current_route
from tests.switchable_relay import SwitchableRelay
from tests.tiny_policy import plain_logprobs, save_tiny_policy, tiny_model, tiny_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
TOKENIZER = tiny_tokenizer()
IDENTITY = {
    "x-babylon-agent": "agent-7",
    "x-babylon-trajectory": "trajectory-9",
    "x-babylon-step": "3",
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three policies; the seed of each is its version."""
    root = tmp_path_factory.mktemp("policies")
    return [save_tiny_policy(root / f"v{version}", seed=version) for version in range(3)]


@dataclass
class Stack:
    """A running gateway over a running engine, both in this process."""

    url: str
    store: Store
    engine: TestServer
    client: AsyncOpenAI

    async def chat(self, **options: Any) -> Any:
        """One chat completion, with the response's headers."""
        asked = {"model": "babylon", "messages": HELLO, "max_tokens": 16, **options}
        return await self.client.chat.completions.with_raw_response.create(**asked)

    async def rows(self) -> list[asyncpg.Record]:
        await wait_until_recorded(self.store, timeout_s=60, silent_s=60)  # it may be starved
        return await self.store.pool.fetch("SELECT * FROM babylon.calls ORDER BY started_at")

    async def route_to(self, policy_version: int) -> int:
        """Commit a route and wait until the gateway serves it."""
        return await route_to(self.store, policy_version)


async def route_to(store: Store, policy_version: int) -> int:
    """Commit a route, wait until every gateway serves it, and return its version."""
    route = await current_route(store)
    version = await commit_route(
        store,
        policy_version=policy_version,
        author="test",
        reason="test",
        expected_route_version=route.route_version,
    )
    await wait_for_acks(store, version, policy_version, timeout_s=20)
    return version


@asynccontextmanager
async def running_stack(store: Store, settings: Settings) -> AsyncIterator[Stack]:
    """Gateway and engine over a database."""
    async with (
        TestServer(make_app(), host="127.0.0.1") as engine,
        running_gateway(store, settings, str(engine.make_url("")).rstrip("/")) as url,
        openai_client(url, settings) as client,
    ):
        yield Stack(url, store, engine, client)


@asynccontextmanager
async def running_gateway(
    store: Store, settings: Settings, engine_url: str, gateway_id: str = "test"
) -> AsyncIterator[str]:
    """Yield the gateway's URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with (
            open_gateway(
                store,
                settings.home,
                settings.serving,
                alias=settings.model.name,
                engine_url=engine_url,
                gateway_id=gateway_id,
                url=url,
            ) as gateway,
            on_uvicorn(gateway, listener),
        ):
            yield url


def openai_client(url: str, settings: Settings) -> AsyncOpenAI:
    key = str(local_key(settings.home.root))
    return AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


async def register(store: Store, checkpoints: list[Path]) -> None:
    """Policy 0 with a route to it, and the others."""
    await ensure_base(store, uri=str(checkpoints[0]), base_model="tiny")
    await store.pool.executemany(
        "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri, base_model)"
        " VALUES ($1, 0, 'full', $2, 'tiny')",
        [(version, str(path)) for version, path in enumerate(checkpoints) if version],
    )


@pytest.fixture
async def stack(store: Store, settings: Settings, checkpoints: list[Path]) -> AsyncIterator[Stack]:
    """Serves policy 0; 1 and 2 are registered."""
    await register(store, checkpoints)
    async with running_stack(store, settings) as stack:
        await until_healthy(stack.url)
        yield stack


@asynccontextmanager
async def on_uvicorn(app: Any, listener: socket.socket) -> AsyncIterator[None]:
    server = uvicorn.Server(server_config(app))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    yield
    server.should_exit = True
    await serving


async def until_healthy(url: str, timeout_s: float = 20, status: str = "ok") -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            with suppress(aiohttp.ClientConnectorError):  # a process that is not up yet
                if (await health(url))["status"] == status:
                    return
            await asyncio.sleep(0.02)


async def health(url: str, key: str = "") -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"{url}/health") as response,
    ):
        found: dict[str, Any] = await response.json()
        return found


def assert_exact(row: asyncpg.Record) -> None:
    """Tokens, text and logprobs of a recorded call agree with the policy that it names."""
    text = TOKENIZER.decode(row["completion_token_ids"], skip_special_tokens=True)
    assert row["response"] == text.replace("\0", "\ufffd")
    assert row["prompt_token_ids"] == TOKENIZER.apply_chat_template(
        json.loads(row["messages"]), add_generation_prompt=True, return_dict=False
    )
    expected = plain_logprobs(
        tiny_model(row["policy_version"]),
        row["prompt_token_ids"],
        row["completion_token_ids"],
        temperature=row["temperature"],
    )
    recorded = torch.tensor(row["logprobs"], dtype=torch.float64)
    torch.testing.assert_close(recorded, expected, atol=1e-4, rtol=0)


async def test_answered_call_is_recorded_exactly(stack: Stack) -> None:
    response = await stack.chat(temperature=0.8, seed=4, extra_headers=IDENTITY)
    answer = response.parse()
    (row,) = await stack.rows()
    assert_exact(row)
    assert row["response"] == answer.choices[0].message.content.replace("\0", "\ufffd")
    assert len(row["completion_token_ids"]) == answer.usage.completion_tokens
    assert answer.model == row["model"] == "babylon-v0"
    headers = response.headers
    assert headers["x-call-id"] == row["call_id"]
    assert headers["x-arm"] == row["arm"] == "champion"
    assert headers["x-model-version"] == str(row["policy_version"]) == "0"
    assert headers["x-route-version"] == str(row["route_version"]) == "1"
    expected = {
        "agent_id": "agent-7",
        "trajectory_id": "trajectory-9",
        "step_number": 3,
        "temperature": 0.8,
        "top_p": 1.0,
        "max_tokens": 16,
        "seed": 4,
        "finish_reason": answer.choices[0].finish_reason,
        "trainable": True,
        "untrainable_reason": None,
        "key_id": "local",
    }
    assert {name: row[name] for name in expected} == expected


async def test_stream_is_recorded_like_the_whole_answer(stack: Stack) -> None:
    whole = (await stack.chat(seed=9)).parse().choices[0].message.content
    response = await stack.chat(seed=9, stream=True, user="agent-8")
    chunks = [chunk async for chunk in response.parse()]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert len(chunks) > 1
    _, row = await stack.rows()
    assert_exact(row)
    assert row["agent_id"] == "agent-8"
    assert row["call_id"] == response.headers["x-call-id"]
    assert row["trainable"]


async def test_client_sees_token_ids_and_logprobs_only_when_it_asks(stack: Stack) -> None:
    plain = (await stack.chat()).parse()
    assert plain.choices[0].logprobs is None
    assert "token_ids" not in plain.choices[0].model_extra
    assert "prompt_token_ids" not in plain.model_extra
    asked = (await stack.chat(logprobs=True, extra_body={"return_token_ids": True})).parse()
    row = (await stack.rows())[1]
    assert asked.choices[0].model_extra["token_ids"] == row["completion_token_ids"]
    assert asked.model_extra["prompt_token_ids"] == row["prompt_token_ids"]
    assert len(asked.choices[0].logprobs.content) == len(row["logprobs"])
    for options, extra in (({}, 0), ({"stream_options": {"include_usage": True}}, 1)):
        stream = (await stack.chat(stream=True, **options)).parse()
        chunks = [chunk async for chunk in stream]
        assert sum(chunk.usage is not None for chunk in chunks) == extra
        assert not any("token_ids" in c.model_extra for chunk in chunks for c in chunk.choices)


async def test_models_lists_the_alias_and_the_versions(stack: Stack) -> None:
    await stack.route_to(1)
    assert [model.id async for model in stack.client.models.list()] == [
        "babylon",
        "babylon-v1",
        "babylon-v0",
    ]
    pinned = await stack.chat(model="babylon-v0")
    assert pinned.headers["x-model-version"] == "0"
    with pytest.raises(openai.NotFoundError, match="'gpt-4o' does not exist"):
        await stack.chat(model="gpt-4o")


async def test_old_versions_are_unloaded_and_the_previous_one_stays_warm(stack: Stack) -> None:
    for version in (1, 2):
        await stack.route_to(version)
    async with aiohttp.ClientSession() as session, asyncio.timeout(20):
        while True:
            async with session.get(stack.engine.make_url("/v1/models")) as response:
                held = {model["id"] for model in (await response.json())["data"]}
            if held == {"babylon-v1", "babylon-v2"}:
                break
            await asyncio.sleep(0.02)


async def test_an_unloadable_policy_leaves_the_old_serving(stack: Stack, tmp_path: Path) -> None:
    await stack.store.pool.execute(
        "UPDATE babylon.policies SET uri = $1 WHERE policy_version = 1", str(tmp_path)
    )
    with pytest.raises(ServingError, match=r"cannot serve route 2: .*no policy loads"):
        await stack.route_to(1)
    assert (await stack.chat()).headers["x-model-version"] == "0"
    found = await health(stack.url, stack.client.api_key)
    assert found["status"] == "ok" and str(tmp_path) in found["reason"]


async def test_without_a_policy_the_gateway_says_what_to_run_and_waits_for_one(
    store: Store, settings: Settings, checkpoints: list[Path]
) -> None:
    async with running_stack(store, settings) as stack:
        await until_healthy(stack.url, status="no policy")
        with pytest.raises(openai.InternalServerError, match="babylon model init") as caught:
            await stack.chat()
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"
        await register(store, checkpoints)
        await until_healthy(stack.url)
        await stack.chat()


async def test_swaps_under_load_lose_mix_and_misattribute_nothing(stack: Stack) -> None:
    commits, clients = 100, 8
    done = asyncio.Event()
    answers: list[tuple[str, str, set[str]]] = []

    async def agent(number: int) -> None:
        while not done.is_set():
            response = await stack.chat(stream=True, max_tokens=12, user=f"agent-{number}")
            models = {chunk.model async for chunk in response.parse()}
            headers = response.headers
            answers.append((headers["x-call-id"], headers["x-model-version"], models))

    agents = [asyncio.create_task(agent(number)) for number in range(clients)]
    for number in range(commits):
        await stack.route_to((number + 1) % 3)
    done.set()
    await asyncio.gather(*agents)

    assert len(answers) >= commits
    assert all(models == {f"babylon-v{version}"} for _, version, models in answers)
    assert len({version for _, version, _ in answers}) == 3
    rows = {row["call_id"]: row for row in await stack.rows()}
    assert rows.keys() == {call_id for call_id, _, _ in answers}
    routed = dict(
        await stack.store.pool.fetch("SELECT route_version, policy_version FROM babylon.routes")
    )
    for call_id, version, _ in answers:
        row = rows[call_id]
        assert row["policy_version"] == int(version) == routed[row["route_version"]]
        assert row["trainable"], row["untrainable_reason"]
    for row in list(rows.values())[:: len(rows) // 60]:
        assert_exact(row)


async def test_client_that_leaves_is_recorded_as_not_trainable(stack: Stack) -> None:
    response = await stack.chat(stream=True, max_tokens=480, seed=1, logprobs=True)
    stream = response.parse()
    await anext(stream)
    await anext(stream)
    await stream.close()
    async with asyncio.timeout(20):
        while not (rows := await stack.rows()):
            await asyncio.sleep(0.02)
    (row,) = rows
    assert 0 < len(row["completion_token_ids"]) < 480
    assert (row["trainable"], row["untrainable_reason"]) == (False, "the client left")
    assert row["finish_reason"] == "interrupted"


async def test_database_that_takes_no_calls_delays_the_record_and_no_answer(stack: Stack) -> None:
    await stack.store.pool.execute("ALTER TABLE babylon.calls RENAME TO hidden")
    first = (await stack.chat()).headers["x-call-id"]
    stream = await stack.chat(stream=True)
    async for _ in stream.parse():
        pass
    with pytest.raises(ServingError, match="calls are not in the database after 0 s"):
        await wait_until_recorded(stack.store, timeout_s=0.3)
    await stack.store.pool.execute("ALTER TABLE babylon.hidden RENAME TO calls")
    assert {row["call_id"] for row in await stack.rows()} == {first, stream.headers["x-call-id"]}


async def test_database_that_is_gone_for_a_while_stops_neither_answers_nor_their_record(
    settings: Settings, store: Store, checkpoints: list[Path]
) -> None:
    await register(store, checkpoints)
    relay, proxied = SwitchableRelay.of(settings)
    async with relay, open_store(proxied) as behind, running_stack(behind, settings) as stack:
        await until_healthy(stack.url)
        answered = {(await stack.chat()).headers["x-call-id"]}
        relay.shut()
        while "the database" not in str(await health(stack.url, stack.client.api_key)):
            await asyncio.sleep(0.05)
        for number in range(6):
            response = await stack.chat(stream=number % 2 == 1, user=f"agent-{number}")
            if number % 2:
                async for _ in response.parse():
                    pass
            answered.add(response.headers["x-call-id"])
            assert response.headers["x-route-version"] == "1"
        await relay.open()
        await wait_until_recorded(store, timeout_s=20)
        rows = await store.pool.fetch("SELECT call_id FROM babylon.calls")
        assert {row["call_id"] for row in rows} == answered
        await stack.route_to(1)


HOSTILE = [
    (b"", 400, "not a JSON object"),
    (b"{", 400, "not a JSON object"),
    (b"[1]", 400, "not a JSON object"),
    (b"[" * 50_000, 400, "not a JSON object"),
    (b'{"messages": [{}]}', 400, "`model`"),
    (b'{"model": "babylon", "messages": "hi"}', 400, "$.messages"),
    (b'{"model": "babylon", "messages": [3]}', 400, "$.messages[0]"),
    (b'{"model": "babylon", "messages": [{"role": "user"}]}', 400, "content"),
    (b'{"model": "babylon", "messages": [{}], "temperature": 3}', 400, "$.temperature"),
    (b'{"model": "babylon", "messages": [{}], "temperature": 1e999}', 400, "out of range"),
    (b'{"model": "babylon", "messages": [{}], "max_tokens": 1e99}', 400, "max_tokens"),
    (b'{"model": "babylon", "messages": [{}], "user": "a\\u0000b"}', 400, "printable"),
    (b" " * (4 * 2**20 + 1), 413, "larger than"),
]


async def test_hostile_body_gets_a_clear_error(stack: Stack) -> None:
    headers = {"authorization": f"Bearer {stack.client.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for body, status, message in HOSTILE:
            async with session.post(
                f"{stack.url}/v1/chat/completions", data=chunks_of(body)
            ) as response:
                error = (await response.json())["error"]
            assert (response.status, error["type"]) == (status, "invalid_request_error")
            assert message in error["message"]
    assert not await stack.rows()


async def test_text_that_postgres_cannot_store_does_not_fail_the_call(stack: Stack) -> None:
    await stack.chat(messages=[{"role": "user", "content": "a\0b"}])
    (row,) = await stack.rows()
    assert json.loads(row["messages"])[0]["content"] == "a\ufffdb"


async def chunks_of(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 2**16):
        yield body[start : start + 2**16]
