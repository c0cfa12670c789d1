"""Requests that two readers could take for different ones, and clients that leave at any byte."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from babylon.core.settings import Settings
from babylon.store import Store
from benchmarks.gateway.upstream import Upstream
from tests.integration.canned_gateway import HELLO, Canned, canned_gateway
from tests.integration.test_serving_hostile import head, raw

ASKED = {"model": "babylon", "messages": HELLO}
BODY = json.dumps(ASKED).encode()
LENGTH = f"content-length: {len(BODY)}"
SECOND = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
DEEP = b'{"model":"babylon","messages":' + b"[" * 100_000


@pytest.fixture
async def gateway(store: Store, settings: Settings) -> AsyncIterator[Canned]:
    async with canned_gateway(store, settings, Upstream()) as gateway:
        yield gateway
        async with gateway.client() as client:  # whatever a test did, the next client is served
            await client.chat.completions.create(**ASKED)


@pytest.mark.parametrize(
    ("lines", "body"),
    [
        ([LENGTH, "transfer-encoding: chunked"], BODY + SECOND),
        (["transfer-encoding: chunked", LENGTH], b"0\r\n\r\n" + SECOND),
        ([LENGTH, f"content-length: {len(BODY) + 1}"], BODY + SECOND),
        ([LENGTH, LENGTH], BODY + SECOND),
        ([f"content-length: +{len(BODY)}"], BODY + SECOND),
        ([f"content-length : {len(BODY)}"], BODY + SECOND),
        (["transfer-encoding: xchunked"], b"0\r\n\r\n" + SECOND),
        (["transfer-encoding: chunked, identity"], b"0\r\n\r\n" + SECOND),
        (["transfer-encoding: chunked"], b"-1\r\n\r\n" + SECOND),
        (["x: a\nb", LENGTH], BODY + SECOND),
    ],
)
async def test_a_request_with_two_readings_is_refused_and_its_connection_ends(
    gateway: Canned, lines: list[str], body: bytes
) -> None:
    answer = await raw(gateway.port, head(gateway, *lines) + body)
    assert answer.startswith(b"HTTP/1.1 400"), answer[:100]
    assert b"200 OK" not in answer and answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "body",
    [DEEP, b'{"model":"\xff\xfe"}', b'{"model":"babylon","messages":"\\ud800"}', b"\x00", b""],
)
async def test_a_body_that_is_no_request_is_400(gateway: Canned, body: bytes) -> None:
    given = head(gateway, f"content-length: {len(body)}", "connection: close")
    assert (await raw(gateway.port, given + body)).startswith(b"HTTP/1.1 400")


async def test_a_repeated_key_is_no_key(gateway: Canned) -> None:
    given = head(gateway, LENGTH, f"authorization: Bearer {gateway.key}", "connection: close")
    assert (await raw(gateway.port, given + BODY)).startswith(b"HTTP/1.1 401")


async def test_a_client_may_leave_at_any_byte(gateway: Canned) -> None:
    """Of a streamed request; then at any point of its answer."""
    body = json.dumps(ASKED | {"stream": True}).encode()
    sent = head(gateway, f"content-length: {len(body)}") + body
    for end in range(1, len(sent), 3):
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(sent[:end])
        writer.close()
        await writer.wait_closed()
    for size in range(1, 3600, 200):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(sent)
        await reader.readexactly(size)
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()
