"""Hostile clients and a broken engine, for each dialect and for events.

After each test the gateway serves others, and has no task, connection or call left over.
``make faults`` leaves at every byte; ``make test`` takes a share.
"""

import asyncio
import json
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import psutil
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from babylon.core.settings import Settings
from babylon.serving.gateway import asgi, http_guard
from babylon.serving.openai_wire import MAX_BODY_BYTES
from babylon.store import Store
from benchmarks.gateway.upstream import Upstream, events
from tests.integration.canned_gateway import HELLO, Canned, canned_gateway
from tests.integration.test_serving_hostile import raw

ALL = os.environ.get("FAULTS") == "all"
REQUEST_STRIDE, ANSWER_STRIDE = (1, 1) if ALL else (11, 400)  # bytes between two departures
EXAMPLES = 400 if ALL else 40  # of an engine's stream
ASKED = {"model": "babylon", "messages": HELLO}
STREAMED = {
    "/v1/chat/completions": ASKED | {"stream": True},
    "/v1/responses": {"model": "babylon", "input": HELLO, "stream": True},
    "/v1/messages": ASKED | {"max_tokens": 16, "stream": True},
}
START = {"type": "start", "trajectory_id": "torture", "agent_id": "tortured", "scenario": "s"}
BODIES = {path: json.dumps(body).encode() for path, body in STREAMED.items()} | {
    "/v1/events": json.dumps({"events": [START]}).encode()
}
ENDS = {
    "/v1/chat/completions": (b"[DONE]", b'"error"'),
    "/v1/responses": (b'"response.completed"', b'"type":"error"'),
    "/v1/messages": (b'"message_stop"', b'"type":"error"'),
}
SECOND = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"


class Scripted(Upstream):
    """An engine that streams ``script``, if there is one."""

    script: list[bytes] | None = None

    async def _answer(self, body: bytes, send: Any) -> None:
        if self.script is None or b'"stream":true' not in body:
            return await super()._answer(body, send)
        head = {"type": "http.response.start", "status": 200}
        await send({**head, "headers": [(b"content-type", b"text/event-stream")]})
        for piece in self.script:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.fixture
def engine() -> Scripted:
    return Scripted()


@pytest.fixture
async def gateway(store: Store, settings: Settings, engine: Scripted) -> AsyncIterator[Canned]:
    async with canned_gateway(store, settings, engine) as gateway:
        await ask(gateway)
        async with nothing_left(gateway):
            yield gateway
            engine.script = None
            await ask(gateway)


async def ask(gateway: Canned) -> None:
    async with gateway.client() as client, asyncio.timeout(120):
        await client.chat.completions.create(**ASKED)


@asynccontextmanager
async def nothing_left(gateway: Canned) -> AsyncIterator[None]:
    """Check that the block leaves no task, no connection and no call of the gateway."""
    yield
    async with asyncio.timeout(60):
        while connections(gateway.port) or any(map(serves_a_request, asyncio.all_tasks())):
            await asyncio.sleep(0.05)
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {gateway.key}"}) as session,
        session.get(f"{gateway.url}/metrics") as response,
    ):
        lines = (await response.text()).splitlines()
    for gauge in ("calls_in_flight", "calls_waiting"):
        assert f"babylon_{gauge} 0.0" in lines, lines


def serves_a_request(task: asyncio.Task[object]) -> bool:
    """A call, or the watch over its client; the gateway's loops go on."""
    return getattr(task.get_coro(), "__name__", "") in ("run_asgi", "_disconnected")


def connections(port: int) -> int:
    """Connections of this process that are open at the gateway's end."""
    mine = psutil.Process().net_connections("tcp")
    return sum(1 for one in mine if one.laddr.port == port and one.status != "LISTEN")


def head(gateway: Canned, path: str, *lines: str) -> bytes:
    given = [f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {gateway.key}", *lines]
    return "\r\n".join([*given, "", ""]).encode("latin-1")


def request(gateway: Canned, path: str, body: bytes, *lines: str) -> bytes:
    return head(gateway, path, f"content-length: {len(body)}", *lines) + body


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_with_two_readings_is_refused_and_its_connection_ends(
    gateway: Canned, path: str
) -> None:
    body = BODIES[path]
    length = f"content-length: {len(body)}"
    chunked = "transfer-encoding: chunked"
    for lines, sent in (
        ([length, chunked], body),
        ([chunked, length], b"0\r\n\r\n"),
        ([length, f"content-length: {len(body) + 1}"], body),
        ([length, length], body),
        ([f"content-length: +{len(body)}"], body),
        ([f"content-length : {len(body)}"], body),
        (["transfer-encoding: xchunked"], b"0\r\n\r\n"),
        (["transfer-encoding: chunked, identity"], b"0\r\n\r\n"),
        ([chunked], b"-1\r\n\r\n"),
        ([chunked, chunked], b"0\r\n\r\n"),
        (["x: a\nb", length], body),
    ):
        answer = await raw(gateway.port, head(gateway, path, *lines) + sent + SECOND)
        assert answer.startswith(b"HTTP/1.1 400"), (lines, answer[:100])
        assert b"200 OK" not in answer and answer.count(b"HTTP/1.1") == 1, lines


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_that_is_no_request_is_refused(gateway: Canned, path: str) -> None:
    good = json.loads(BODIES[path])
    field = next(name for name in ("messages", "input", "events") if name in good)
    for body in (
        b"",
        b"\x00",
        b"null",
        b'{"model":"\xff\xfe"}',
        b'{"model":"babylon","%s":' % field.encode() + b"[" * 100_000,
        b'{"model":"babylon","%s":' % field.encode() + b'{"a":' * 100_000,
        json.dumps(good | {field: ["\ud800"]}).encode(),
        json.dumps(good | {field: [[[]]]}).encode(),
        json.dumps(good | {field: [0] * 200_000}).encode(),
        b'{"model":"babylon","stream":true,"max_tokens":%s}' % (b"9" * 10_000),
        b'{"model":"babylon","stream":true,"temperature":1e999,"max_tokens":NaN}',
    ):
        answer = await raw(gateway.port, request(gateway, path, body, "connection: close"))
        assert answer.startswith(b"HTTP/1.1 400"), (body[:80], answer[:300])
    chunk = b"10000\r\n" + b" " * 2**16 + b"\r\n"
    for line, pieces in (
        ("transfer-encoding: chunked", [chunk] * (MAX_BODY_BYTES // 2**16 + 1)),
        (f"content-length: {MAX_BODY_BYTES + 1}", []),
    ):
        answer = await raw(gateway.port, head(gateway, path, line), *pieces)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 413"), answer[:200]


@pytest.mark.parametrize("path", BODIES)
async def test_a_header_of_identity_that_is_sent_twice_is_refused(
    gateway: Canned, path: str
) -> None:
    key = f"authorization: Bearer {gateway.key}"
    answer = await raw(gateway.port, request(gateway, path, BODIES[path], key, "connection: close"))
    assert answer.startswith(b"HTTP/1.1 401"), answer[:200]
    if path != "/v1/events":  # which reads no such header
        twice = ["x-babylon-trajectory: a", "x-babylon-trajectory: b", "connection: close"]
        answer = await raw(gateway.port, request(gateway, path, BODIES[path], *twice))
        assert answer.startswith(b"HTTP/1.1 400") and b"is sent twice" in answer


async def test_a_hundred_slow_clients_are_cut_off_and_stop_nobody(
    gateway: Canned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_guard, "HEAD_S", 0.5)
    monkeypatch.setattr(asgi, "BODY_S", 0.5)
    paths = [*BODIES]

    async def slow(number: int) -> bytes:
        path = paths[number % len(paths)]
        sent = request(gateway, path, BODIES[path])
        end = sent.index(b"\r\n\r\n") + 4
        # half of them never end their head, the others never end their body
        return await raw(gateway.port, sent[: end + 9 if number % 8 < 4 else end - 3])

    attack = asyncio.gather(*(slow(number) for number in range(100)))
    while not attack.done():
        await ask(gateway)
    assert all(not answer or answer.startswith(b"HTTP/1.1 408") for answer in await attack)


@pytest.mark.parametrize("path", BODIES)
async def test_a_client_may_leave_at_any_byte_of_its_request(gateway: Canned, path: str) -> None:
    sent = request(gateway, path, BODIES[path])
    for end in range(1, len(sent), REQUEST_STRIDE):
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(sent[:end])
        writer.close() if end % 2 else writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()
    await ask(gateway)
    started = await gateway.store.pool.fetchval("SELECT count(*) FROM babylon.plays")
    assert (len(await gateway.rows()), started) == (2, 0)  # of ``ask``; no half request counts


@pytest.mark.parametrize("path", STREAMED)
async def test_a_client_may_leave_at_any_byte_of_its_answer(gateway: Canned, path: str) -> None:
    """Each call that has begun to answer is recorded once: whole, or as a part."""
    sent = request(gateway, path, BODIES[path])
    whole = await raw(gateway.port, request(gateway, path, BODIES[path], "connection: close"))
    asked = range(1, len(whole) - 100, ANSWER_STRIDE)  # kept alive, it has shorter headers
    for size in asked:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(sent)
        await reader.readexactly(size)
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()
    await ask(gateway)
    rows = await gateway.rows()
    assert len({row["call_id"] for row in rows}) == len(rows) <= len(asked) + 3
    for row in rows:
        reason = None if row["trainable"] else "the client left"
        assert row["untrainable_reason"] == reason
        assert len(row["completion_token_ids"]) == len(row["logprobs"]) > 0


GOOD = events(exact=True)
CHUNK = json.loads(GOOD[1].removeprefix(b"data: "))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
PLACES = (
    (),
    ("choices",),
    ("choices", 0),
    ("choices", 0, "delta"),
    ("choices", 0, "delta", "content"),
    ("choices", 0, "delta", "tool_calls"),
    ("choices", 0, "logprobs"),
    ("choices", 0, "logprobs", "content"),
    ("choices", 0, "token_ids"),
    ("choices", 0, "finish_reason"),
    ("choices", 0, "index"),
    ("usage",),
    ("prompt_token_ids",),
    ("id",),
    ("error",),
)


def changed(place: tuple[Any, ...], value: object) -> bytes:
    """A chunk of an answer with another value at one place."""
    chunk = json.loads(json.dumps(CHUNK))
    if not place:
        chunk = value
    else:
        *path, last = place
        inside = chunk
        for step in path:
            inside = inside[step]
        inside[last] = value
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


EVENTS = st.one_of(
    st.sampled_from(GOOD),
    st.builds(changed, st.sampled_from(PLACES), JSON),
    st.binary(max_size=12),
    st.sampled_from([b": beat\n\n", b"data:\n\n", b"event: x\r\n", b"\xef\xbb\xbf", b"\r"]),
)
SCRIPTS = st.one_of(
    st.lists(EVENTS, max_size=8),
    # an answer that is whole, but for one event at one place
    st.builds(lambda event, at: [*GOOD[:at], event, *GOOD[at:]], EVENTS, st.integers(0, len(GOOD))),
)


@hypothesis_settings(
    max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(script=SCRIPTS)
async def test_whatever_an_engine_streams_ends_well_or_with_an_error(
    gateway: Canned, engine: Scripted, script: list[bytes]
) -> None:
    engine.script = script
    for path, (end, error) in ENDS.items():
        answer = await raw(gateway.port, request(gateway, path, BODIES[path], "connection: close"))
        status = int(answer.split(b" ")[1])
        assert status in (200, 502, 503), answer
        well = status == 200 and end in answer[-2000:]
        assert well or error in answer[-2000:] or status != 200, answer
        if status == 503:  # the engine is taken out until its next probe
            await asyncio.sleep(0.05)
    for row in await gateway.rows():
        if row["trainable"]:
            scores = row["logprobs"]
            assert len(scores) == len(row["completion_token_ids"]) > 0
            assert all(map(math.isfinite, scores))
    engine.script = None
