"""A client whose calls break the engine's answers, beside clients whose calls do not."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import openai
import pytest

from babylon.core.settings import Settings
from babylon.serving.gateway import engine_client, http_guard, readiness
from babylon.serving.gateway.calls import CallHandler
from babylon.serving.gateway.exchange import Exchange
from babylon.store import Store
from benchmarks.gateway.upstream import Upstream, events
from tests.integration.canned_gateway import HELLO, Canned, canned_gateway

BODY = {"model": "babylon", "messages": HELLO}
POISONS = ("cut", "undecodable", "misshapen", "404", "500", "error", "hangs", "closes")


class Poisoned(Upstream):
    """An engine that breaks in the way that a request's ``user`` names. ``wedged``: for all."""

    def __init__(self) -> None:
        super().__init__()
        self.wedged = False
        self.over = asyncio.Event()

    async def _answer(self, body: bytes, send: Any) -> None:
        poison = json.loads(body).get("user")
        if poison == "hangs" or self.wedged:
            await self.over.wait()
        if poison == "closes":
            raise ConnectionResetError
        if poison not in POISONS:
            return await super()._answer(body, send)
        status = int(poison) if poison.isdigit() else 200
        data = {
            "cut": b'data: {"choices":[]}\n\n',
            "undecodable": b"data: {{{\n\n" if b'"stream":true' in body else b"{{{",
            "misshapen": b'data: {"choices":[3]}\n\n' if b'"stream":true' in body else b"[3]",
            "error": b'data: {"error":{"message":"out of memory"}}\n\n',
        }.get(poison, b'{"error":{"message":"no"}}')
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": data, "more_body": False})


@pytest.fixture
def engine() -> Poisoned:
    return Poisoned()


@pytest.fixture
async def gateway(
    store: Store, settings: Settings, engine: Poisoned, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Canned]:
    monkeypatch.setattr(engine_client, "FIRST_CHUNK_S", 0.3)
    monkeypatch.setattr(engine_client, "PROBE_S", 0.3)
    async with canned_gateway(store, settings, engine) as gateway:
        yield gateway
        engine.over.set()


async def test_a_poisoned_client_fails_alone(gateway: Canned) -> None:
    """Whole and streamed, one poison after the other, beside eight clients that never pause."""
    failed, answered, over = list[str](), 0, asyncio.Event()

    async def innocent(client: openai.AsyncOpenAI) -> None:
        nonlocal answered
        while not over.is_set():
            try:
                await client.chat.completions.create(**BODY)
                answered += 1
            except openai.OpenAIError as error:
                failed.append(repr(error))

    async def poison(client: openai.AsyncOpenAI) -> None:
        for kind in POISONS:
            for stream in (False, True) * readiness.FAILURES:
                if kind == "hangs" and not stream:
                    continue  # waits as long as a slow answer may take
                with pytest.raises((openai.OpenAIError, aiohttp.ClientError)):
                    reply = await client.chat.completions.create(**BODY, user=kind, stream=stream)
                    if stream:
                        _ = [chunk async for chunk in reply]

    async with gateway.client() as client, asyncio.TaskGroup() as beside:
        for _ in range(8):
            beside.create_task(innocent(client))
        await poison(client)
        while answered <= 100 and not failed:  # on a slow machine the poison acts before
            await asyncio.sleep(0.1)
        over.set()
    assert not failed, f"{len(failed)} of {answered + len(failed)}: {failed[0]}"
    assert answered > 100


async def test_a_poisoned_client_that_is_alone_does_not_end_serving(gateway: Canned) -> None:
    async with gateway.client() as client:
        for _ in range(3 * readiness.FAILURES):
            with pytest.raises(openai.APIStatusError):
                await client.chat.completions.create(**BODY, user="undecodable")
        await client.chat.completions.create(**BODY)


async def test_an_engine_that_answers_nobody_is_taken_out_and_back(
    gateway: Canned, engine: Poisoned
) -> None:
    """It still lists its policies. Only a probe tells that it is wedged, and that it is not."""
    engine.wedged = True
    async with gateway.client() as client:
        for _ in range(readiness.FAILURES):
            with pytest.raises(openai.APIError, match="broke off"):
                reply = await client.chat.completions.create(**BODY, stream=True)
                _ = [chunk async for chunk in reply]
        assert (await _until_state(gateway, "down"))["status"] == "unavailable"
        with pytest.raises(openai.InternalServerError, match="does not answer") as told:
            await client.chat.completions.create(**BODY)
        assert "127.0.0.1" not in str(told.value)
        engine.wedged = False
        await _until_state(gateway, "serving")
        await client.chat.completions.create(**BODY)


async def test_the_address_of_an_engine_is_for_the_log(
    gateway: Canned, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(url: str, *_: object, **__: object) -> None:
        raise ConnectionRefusedError("10.0.0.7:8001 refused the connection")

    monkeypatch.setattr(engine_client.EngineConnections, "ask", AsyncMock(side_effect=refused))
    for path in ("/v1/chat/completions", "/tokenize"):
        async with gateway.client() as client:
            with pytest.raises(openai.InternalServerError, match="does not answer") as told:
                await client.with_options(base_url=gateway.url).post(
                    path, body=BODY, cast_to=object
                )
        assert told.value.status_code == 503 and not re.search(r":\d", str(told.value))
    assert "10.0.0.7:8001 refused" in caplog.text


class _Quoting(Upstream):
    """Ends each answer after some tokens with an error that repeats the prompt."""

    async def _answer(self, body: bytes, send: Any) -> None:
        error = {"error": {"message": f"cannot go on after {body.decode()}"}}
        head = {"type": "http.response.start", "status": 200}
        await send({**head, "headers": [(b"content-type", b"text/event-stream")]})
        data = b"".join(events(exact=True)[:4]) + f"data: {json.dumps(error)}\n\n".encode()
        await send({"type": "http.response.body", "body": data, "more_body": False})


async def test_an_engines_error_is_told_to_the_client_only(
    store: Store, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {**BODY, "messages": [{"role": "user", "content": "card 4111"}]}
    async with canned_gateway(store, settings, _Quoting()) as gateway, gateway.client() as client:
        for _ in range(readiness.FAILURES):
            with pytest.raises(openai.APIError, match="card 4111"):
                async for _ in await client.chat.completions.create(**asked, stream=True):
                    pass
        rows = await gateway.rows()
    reasons = {row["untrainable_reason"] for row in rows}
    assert reasons == {"the engine's answer broke off (it ends with an error)"}
    assert "it ends with an error" in caplog.text and "4111" not in caplog.text


async def _until_state(gateway: Canned, state: str) -> dict[str, Any]:
    async with asyncio.timeout(20), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{gateway.url}/health") as response:
                body: dict[str, Any] = await response.json()
                if body["state"] == state:
                    return body
            await asyncio.sleep(0.02)


async def test_a_field_of_the_other_endpoint_costs_nothing(gateway: Canned) -> None:
    async with gateway.client() as client:
        await client.completions.create(model="babylon", prompt="x", extra_body={"messages": ["x"]})
    (row,) = await gateway.rows()
    assert row["finish_reason"] != "interrupted"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_at_which_the_gateway_fails_is_recorded_and_counted_as_an_error(
    gateway: Canned, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def defect(_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(Exchange, "untrainable_reason", defect)
    async with gateway.client() as client:
        with pytest.raises(openai.APIError, match="KeyError in the gateway: its log says where"):
            answer = await client.chat.completions.create(**BODY, stream=stream)
            if stream:
                _ = [chunk async for chunk in answer]
    (row,) = await gateway.rows()
    assert row["untrainable_reason"] == "the gateway failed or stopped"
    assert row["completion_token_ids"]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {gateway.key}"}) as http:
        metrics = await (await http.get(f"{gateway.url}/metrics")).text()
    assert 'outcome="500",version="0"} 1.0' in metrics


class _Stalls(Upstream):
    """Streams two tokens and no more."""

    async def _answer(self, body: bytes, send: Any) -> None:
        kind = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        begun = b"".join(events(exact=True)[:3])
        await send({"type": "http.response.body", "body": begun, "more_body": True})
        await asyncio.Event().wait()


async def test_a_call_that_outlasts_the_gateway_is_recorded_as_far_as_it_came(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_guard, "STOP_S", 0.2)
    record = CallHandler._record_interrupted

    async def late(self: CallHandler, exchange: Exchange, reason: str) -> None:
        await asyncio.sleep(0.3)  # as on a busy machine
        await record(self, exchange, reason)

    monkeypatch.setattr(CallHandler, "_record_interrupted", late)
    async with canned_gateway(store, settings, _Stalls()) as gateway:
        client = gateway.client()
        answer = await client.chat.completions.create(**BODY, stream=True)
        _ = [await anext(answer) for _ in range(3)]
    (row,) = await store.pool.fetch("SELECT * FROM babylon.calls")
    assert (row["finish_reason"], len(row["completion_token_ids"])) == ("interrupted", 2)
    await client.close()
