"""Hostile, broken and unauthorised clients: each gets an error, and the gateway keeps serving."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx
import openai
import pytest

from babylon.core.api_keys import new_key
from babylon.core.settings import Settings
from babylon.serving.gateway import asgi, http_guard, key_limits, limits
from babylon.serving.openai_wire import MAX_BODY_BYTES
from babylon.store import Store
from babylon.store.api_keys import create_key, revoke_key
from benchmarks.gateway.upstream import PROMPT_TOKENS, TOKENS, Upstream
from tests.integration.canned_gateway import HELLO, Canned, canned_gateway
from tests.integration.test_serving import health

BODY = {"model": "babylon", "messages": HELLO}


class SlowUpstream(Upstream):
    """An engine that answers when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.go.set()
        self.bodies: list[bytes] = []

    @property
    def asked(self) -> int:
        return len(self.bodies)

    async def _answer(self, body: bytes, send: Any) -> None:
        self.bodies.append(body)
        await self.go.wait()
        await super()._answer(body, send)

    async def until_asked(self, times: int) -> None:
        async with asyncio.timeout(60):
            while self.asked < times:
                await asyncio.sleep(0.01)


@pytest.fixture
def engine() -> SlowUpstream:
    return SlowUpstream()


@pytest.fixture
async def gateway(store: Store, settings: Settings, engine: SlowUpstream) -> AsyncIterator[Canned]:
    few = settings.replace(serving={"max_concurrency": 2, "max_queue": 1})
    async with canned_gateway(store, few, engine) as gateway:
        yield gateway
        async with gateway.client() as client:  # whatever a test did, the next client is served
            engine.go.set()
            await client.chat.completions.create(**BODY)


async def raw(port: int, *pieces: bytes, timeout_s: float = 60) -> bytes:
    """All bytes until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(timeout_s):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await reader.read()
    except (ConnectionResetError, BrokenPipeError):
        return b""
    finally:
        writer.close()


def head(gateway: Canned, *lines: str, method: str = "POST") -> bytes:
    given = [
        f"{method} /v1/chat/completions HTTP/1.1",
        "host: x",
        f"authorization: Bearer {gateway.key}",
        *lines,
    ]
    return "\r\n".join([*given, "", ""]).encode("latin-1")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models", 401),
        ("/v1/chat/completions", 401),
        ("/v1/completions", 401),
        ("/metrics", 401),
        ("/health", 200),
        ("/health/live", 200),
        ("/admin", 404),
    ],
)
async def test_without_a_key_only_health_is_told(gateway: Canned, path: str, status: int) -> None:
    method = "POST" if "completions" in path else "GET"
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, gateway.url + path, data=b"{") as response,
    ):
        assert response.status == status
        assert gateway.key not in await response.text()


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/health/live"])
async def test_head_of_a_health_path_is_answered_as_get_without_its_body(
    gateway: Canned, path: str
) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        told, asked = await http.get(path), await http.head(path)
        assert asked.status_code == told.status_code == 200 and asked.content == b""
        assert asked.headers["content-length"] == told.headers["content-length"]
        assert (await http.get(path)).content == told.content  # the connection is as it should be


async def test_only_a_reader_is_told_the_route_and_the_reason(gateway: Canned) -> None:
    """A reason may name addresses, and an agent must not know of an experiment."""
    reader = await create_key(gateway.store, "grafana", scopes=["read"])
    infer = await create_key(gateway.store, "agents", scopes=["infer"])
    async with gateway.client(str(reader)) as client:
        await until_known(client)
    state = {"status": "ok", "state": "serving"}
    assert [await health(gateway.url, key) for key in ("", "wrong", str(infer))] == [state] * 3
    told = await health(gateway.url, str(reader))
    assert state.items() < told.items() and {"reason", "challenger", "model"} <= told.keys()


async def test_keys_do_what_their_scopes_say_until_they_are_revoked(gateway: Canned) -> None:
    reader = await create_key(gateway.store, "grafana", scopes=["read"])
    infer = await create_key(gateway.store, "agents", scopes=["infer"])
    async with gateway.client(str(reader)) as client:
        await until_known(client)
        with pytest.raises(openai.PermissionDeniedError, match="lacks the scope infer"):
            await client.chat.completions.create(**BODY)
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {infer}"}) as session,
        session.get(f"{gateway.url}/metrics") as response,
    ):
        assert response.status == 403
    async with gateway.client(str(infer)) as client:
        await client.chat.completions.create(**BODY)
        await revoke_key(gateway.store, infer.key_id)
        async with asyncio.timeout(60):
            with pytest.raises(openai.AuthenticationError):
                while True:
                    await client.models.list()
    (row,) = await gateway.rows()
    assert row["key_id"] == infer.key_id
    stored = await gateway.store.pool.fetch("SELECT k::text FROM babylon.api_keys k")
    assert not any(key.secret in str(stored) for key in (reader, infer))


async def until_known(client: openai.AsyncOpenAI) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await client.models.list()
                return
            except openai.AuthenticationError:
                await asyncio.sleep(0.02)


async def test_a_key_speaks_for_its_agents_only(gateway: Canned) -> None:
    key = await create_key(gateway.store, "alice", scopes=["infer"], agents=["alice"])
    async with gateway.client(str(key)) as client:
        await until_known(client)
        for named in (
            {"extra_headers": {"x-babylon-agent": "bob"}},
            {"user": "alice", "extra_headers": {"x-babylon-agent": "bob"}},
        ):
            with pytest.raises(openai.PermissionDeniedError, match="key is for alice"):
                await client.chat.completions.create(**BODY, **named)
        await client.chat.completions.create(**BODY)
        await client.chat.completions.create(**BODY, user="bob")  # a user of alice's
    async with gateway.client(str(new_key())) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(**BODY)
    assert [row["agent_id"] for row in await gateway.rows()] == ["alice", "alice"]


async def test_an_identity_that_is_sent_twice_is_refused(gateway: Canned) -> None:
    body = json.dumps(BODY).encode()
    twice = ["x-babylon-agent: alice", "X-Babylon-Agent: bob", f"content-length: {len(body)}"]
    answer = await raw(gateway.port, head(gateway, *twice, "connection: close"), body)
    assert b" 400 " in answer and b"x-babylon-agent is sent twice" in answer


@pytest.mark.parametrize(
    "line",
    [
        "x-babylon-agent: a\rx-arm: evil",
        "x-babylon-agent: a\nbad line",
        "x-babylon-agent: a\0b",
        "content-length: 10\r\ntransfer-encoding: chunked",
        "content-length: 1e3",
        "content-length: -1",
    ],
)
async def test_headers_that_could_smuggle_a_request_are_refused(
    gateway: Canned, engine: SlowUpstream, line: str
) -> None:
    body = json.dumps(BODY).encode()
    length = "" if "content-length" in line else f"content-length: {len(body)}"
    lines = [part for part in (line, length, "connection: close") if part]
    answer = await raw(gateway.port, head(gateway, *lines), body)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"evil" not in answer
    assert engine.asked == 0


async def test_a_body_that_says_it_is_too_large_is_not_waited_for(gateway: Canned) -> None:
    answer = await raw(gateway.port, head(gateway, "content-length: 99999999999"))
    assert b" 413 " in answer and b"larger than" in answer


async def test_a_client_that_sends_twice_the_limit_reads_why_it_is_refused(
    gateway: Canned, engine: SlowUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asgi, "DRAIN_S", 60.0)
    headers = {"authorization": f"Bearer {gateway.key}"}
    body = b"x" * 2 * MAX_BODY_BYTES

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 2**16):
            yield body[at : at + 2**16]

    async with httpx.AsyncClient(headers=headers, timeout=60) as http:
        for path in ("chat/completions", "responses", "events"):
            for content in (body, chunks()):  # with a length, and without one
                answer = await http.post(f"{gateway.url}/v1/{path}", content=content)
                assert (answer.status_code, answer.headers["connection"]) == (413, "close")
                assert "send less" in answer.text
    waiting = head(gateway, f"content-length: {len(body)}", "expect: 100-continue")
    assert (await raw(gateway.port, waiting)).startswith(b"HTTP/1.1 413 ")  # no word to go on
    assert engine.asked == 0


async def test_a_head_without_an_end_is_cut_off(gateway: Canned) -> None:
    pieces = [b"x-filler: " + b"a" * 1000 + b"\r\n"] * 200
    answer = await raw(gateway.port, head(gateway)[:-2], *pieces)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")


async def test_slow_requests_time_out(gateway: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_guard, "HEAD_S", 0.1)
    monkeypatch.setattr(asgi, "BODY_S", 0.1)
    assert await raw(gateway.port) == b""
    assert await raw(gateway.port, head(gateway)[:-2]) == b""
    answer = await raw(gateway.port, head(gateway, "content-length: 100"), b"{")
    assert b" 408 " in answer and b"incomplete body" in answer


async def test_a_client_that_reads_nothing_is_cut_off_and_the_call_kept_as_a_part(
    gateway: Canned, engine: SlowUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_guard, "STALL_S", 0.2)
    engine._events[True][1:1] = [engine._events[True][1]] * 60_000  # more than sockets hold
    body = json.dumps({**BODY, "stream": True}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
    writer.write(head(gateway, f"content-length: {len(body)}") + body)
    async with asyncio.timeout(30):
        while not (rows := await gateway.rows()):
            await asyncio.sleep(0.05)
    writer.transport.abort()
    assert (rows[0]["untrainable_reason"], rows[0]["trainable"]) == ("the client left", False)


async def test_a_client_that_leaves_frees_its_place(gateway: Canned, engine: SlowUpstream) -> None:
    engine.go.clear()
    async with gateway.client() as client:
        waiting = [asyncio.create_task(client.chat.completions.create(**BODY)) for _ in range(3)]
        await engine.until_asked(2)
        with pytest.raises(openai.InternalServerError, match="1 calls are waiting") as caught:
            while True:  # two are served, one waits, and more do not fit
                await asyncio.wait_for(client.chat.completions.create(**BODY), 5)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        engine.go.set()
        await client.chat.completions.create(**BODY)
    assert len(await gateway.rows()) == 1


async def test_a_call_of_two_answers_takes_two_places(
    gateway: Canned, engine: SlowUpstream
) -> None:
    engine.go.clear()
    async with gateway.client() as client:
        calls = [asyncio.create_task(client.chat.completions.create(**BODY, n=2))]
        await engine.until_asked(1)
        calls.append(asyncio.create_task(client.chat.completions.create(**BODY)))
        await until_waiting(gateway, 1)
        assert engine.asked == 1
        engine.go.set()
        await asyncio.gather(*calls)


async def test_a_place_that_does_not_come_is_not_waited_for_for_ever(
    gateway: Canned, engine: SlowUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "QUEUE_WAIT_S", 0.1)
    engine.go.clear()
    async with gateway.client() as client:
        served = [asyncio.create_task(client.chat.completions.create(**BODY)) for _ in range(2)]
        await engine.until_asked(2)
        with pytest.raises(openai.InternalServerError, match="no free slot after"):
            await client.chat.completions.create(**BODY)
        engine.go.set()
        await asyncio.gather(*served)


async def test_nobody_else_calls_for_an_agent_with_a_key(gateway: Canned) -> None:
    await create_key(gateway.store, "crowd", scopes=["infer"], agents=["crowd-*"])
    async with gateway.client() as client, asyncio.timeout(5):
        with pytest.raises(openai.PermissionDeniedError, match="key of its own"):
            while True:  # until the gateway knows the key
                await client.chat.completions.create(**BODY, user="crowd-7")
        await client.chat.completions.create(**BODY, user="alone-7")


async def test_a_key_has_a_limit_of_concurrent_calls(gateway: Canned, engine: SlowUpstream) -> None:
    key = await create_key(gateway.store, "one", scopes=["infer"], max_concurrency=1)
    async with gateway.client(str(key)) as client:
        await until_known(client)
        engine.go.clear()
        first = asyncio.create_task(client.chat.completions.create(**BODY))
        await engine.until_asked(1)
        with pytest.raises(openai.RateLimitError, match="its limit") as caught:
            await client.chat.completions.create(**BODY)
        assert caught.value.response.headers["retry-after"] == "1"
        engine.go.set()
        await first
        await client.chat.completions.create(**BODY)


async def test_a_limit_of_concurrent_calls_holds_over_two_gateways(
    gateway: Canned, settings: Settings, engine: SlowUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_limits, "EXCHANGE_S", 0.02)
    key = await create_key(gateway.store, "one", scopes=["infer"], max_concurrency=1)
    async with (
        canned_gateway(gateway.store, settings, engine, "second") as other,
        gateway.client(str(key)) as first,
        other.client(str(key)) as second,
    ):
        await until_known(first)
        await until_known(second)
        await second.chat.completions.create(**BODY)  # it asks for the others' counts from now on
        engine.go.clear()
        running = asyncio.create_task(first.chat.completions.create(**BODY))
        counted = "SELECT seen_at FROM babylon.key_usage WHERE gateway_id = 'test' AND running = 1"
        read = "SELECT 1 FROM babylon.key_usage WHERE gateway_id = 'second' AND seen_at > $1"
        async with asyncio.timeout(20):
            for _ in range(2):  # the second reading begins after the first one is taken in
                while not (since := await gateway.store.pool.fetchval(counted)):
                    await asyncio.sleep(0.02)
                while not await gateway.store.pool.fetchval(read, since):
                    await asyncio.sleep(0.02)
            with pytest.raises(openai.RateLimitError, match="1 running calls"):
                await second.chat.completions.create(**BODY)
        engine.go.set()
        await running


async def test_events_and_counts_of_tokens_count_as_requests_and_not_as_calls(
    gateway: Canned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_limits, "_minute", lambda: 7)
    key = await create_key(
        gateway.store,
        *("metered",),
        scopes=["infer", "record"],
        requests_per_minute=3,
        tokens_per_minute=1,
    )
    headers = {"authorization": f"Bearer {key}"}
    async with (
        gateway.client(str(key)) as client,
        httpx.AsyncClient(base_url=gateway.url, headers=headers) as http,
    ):
        await until_known(client)
        await client.chat.completions.create(**BODY)  # spends all tokens
        start = {"events": [{"type": "start", "trajectory_id": "t"}]}
        assert (await http.post("/v1/events", json=start)).status_code == 200
        assert (await http.get("/v1/trajectories/t")).status_code == 200
        for path, body in (("/v1/events", start), ("/tokenize", BODY)):
            refused = await http.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                429,
                "rate_limit_exceeded",
            )
            assert 1 <= int(refused.headers["retry-after"]) <= 60


async def test_a_key_with_many_waiting_calls_does_not_hold_up_another_keys_call(
    gateway: Canned, settings: Settings, engine: SlowUpstream
) -> None:
    keys = [await create_key(gateway.store, name, scopes=["infer"]) for name in ("many", "one")]
    narrow = settings.replace(serving={"max_concurrency": 1})
    async with (
        canned_gateway(gateway.store, narrow, engine, "narrow") as busy,
        busy.client(str(keys[0])) as many,
        busy.client(str(keys[1])) as one,
    ):
        await until_known(many)
        await until_known(one)
        engine.go.clear()
        calls = [asyncio.create_task(many.chat.completions.create(**BODY)) for _ in range(30)]
        await until_waiting(busy, 29)
        calls.append(asyncio.create_task(one.chat.completions.create(**BODY, user="one")))
        await until_waiting(busy, 30)
        engine.go.set()
        await asyncio.gather(*calls)
    (place,) = [number for number, body in enumerate(engine.bodies) if b'"user":"one"' in body]
    assert (place, len(engine.bodies)) == (2, 31)  # after the one that ran, and one turn


async def until_waiting(gateway: Canned, calls: int) -> None:
    headers = {"authorization": f"Bearer {gateway.key}"}
    async with httpx.AsyncClient(headers=headers) as http, asyncio.timeout(30):
        while (
            f"babylon_calls_waiting {calls:.1f}\n"
            not in (await http.get(f"{gateway.url}/metrics")).text
        ):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ({"requests_per_minute": 3}, "3 requests in this minute"),
        ({"tokens_per_minute": 3 * (PROMPT_TOKENS + TOKENS)}, "tokens in this minute"),
    ],
)
async def test_limits_of_a_minute_hold_over_all_gateways_and_without_the_database(
    gateway: Canned,
    settings: Settings,
    engine: SlowUpstream,
    monkeypatch: pytest.MonkeyPatch,
    limit: dict[str, int],
    reason: str,
) -> None:
    minute = [7]
    monkeypatch.setattr(key_limits, "_minute", lambda: minute[0])
    monkeypatch.setattr(key_limits, "EXCHANGE_S", 0.02)
    key = await create_key(gateway.store, "metered", scopes=["infer"], **limit)
    async with (
        canned_gateway(gateway.store, settings, engine, "second") as other,
        gateway.client(str(key)) as first,
        other.client(str(key)) as second,
    ):
        await until_known(first)
        await until_known(second)
        for client in (first, second, first):
            await client.chat.completions.create(**BODY)
        for client in (first, second):
            async with asyncio.timeout(5):
                with pytest.raises(openai.RateLimitError, match=reason) as caught:
                    await asyncio.sleep(0.3)  # until it has read what the other admitted
                    await client.chat.completions.create(**BODY)
            assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        minute[0] += 1
        await second.chat.completions.create(**BODY)
        monkeypatch.setattr(key_limits, "STALE_S", 0)  # as if the database were away
        with pytest.raises(openai.RateLimitError, match="in this minute"):
            for _ in range(2):  # its share is half of the limit
                await second.chat.completions.create(**BODY)


@pytest.mark.parametrize("over", [0, 1])
async def test_the_limit_of_a_head_is_exact(gateway: Canned, over: int) -> None:
    given = head(gateway, "connection: close", "content-length: 2", "x-long: ")[:-2]
    path = len("/v1/chat/completions")
    lines = given.split(b"\r\n")[1:-1]
    size = path + sum(len(line) + 2 for line in lines)  # "name: value" and its line end
    long = b"x" * (http_guard.MAX_HEAD_BYTES - size + over)
    answer = await raw(gateway.port, given[:-2] + long + b"\r\n\r\n{}")
    assert answer.split(b" ")[1] == (b"431" if over else b"400"), answer[:200]
