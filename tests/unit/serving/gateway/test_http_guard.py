"""The head of a response leaves with what follows it, and alone if nothing does."""

import asyncio
from collections.abc import Sequence

import pytest
import uvicorn
from uvicorn.server import ServerState

from babylon.serving.gateway.asgi import Receive, Response, Scope, Send
from babylon.serving.gateway.http_guard import (
    MAX_HEAD_BYTES,
    GuardedProtocol,
    server_config,
)


class Packets(asyncio.Transport):
    """What one connection writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.written.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    response = Response(send)
    match scope["path"]:
        case "/whole":
            await response.whole(b"body")
        case "/stream":
            await response.start(200, [])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await response.write(b"first")
            await response.write(b"second", last=True)
        case "/body":
            await receive()
            await response.whole(b"body")
        case "/fails":
            await response.start(200, [])
            raise RuntimeError("broken")


async def answered(request: bytes) -> tuple[list[bytes], bool]:
    """Return what is written to a request, and whether the connection is closed."""
    config: uvicorn.Config = server_config(app)
    config.load()
    protocol, packets = GuardedProtocol(config, ServerState(), {}), Packets()
    protocol.connection_made(packets)
    protocol.data_received(request)
    await asyncio.sleep(0.02)
    closed = packets.closed
    protocol.connection_lost(None)
    return packets.written, closed


def bodies(written: Sequence[bytes]) -> list[bytes]:
    """Return the written parts without their heads, and check that one head begins them."""
    assert written[0].startswith(b"HTTP/1.1 200 OK\r\n")
    return [written[0].partition(b"\r\n\r\n")[2], *written[1:]]


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        (b"GET /whole", [b"body"]),
        (b"GET /stream", [b"", b"5\r\nfirst\r\n", b"6\r\nsecond\r\n0\r\n\r\n"]),
        (b"HEAD /whole", [b""]),
        (b"GET /fails", [b""]),
    ],
)
@pytest.mark.parametrize("close", [False, True])
async def test_a_head_is_written_once(path: bytes, parts: list[bytes], close: bool) -> None:
    ending = b"Connection: close\r\n" if close else b""
    written, closed = await answered(path + b" HTTP/1.1\r\nHost: h\r\n" + ending + b"\r\n")
    assert bodies(written) == parts
    assert closed == (close or path == b"GET /fails")


async def test_two_requests_at_once_get_their_answers_in_order() -> None:
    request = b"GET /whole HTTP/1.1\r\nHost: h\r\n\r\nHEAD /whole HTTP/1.1\r\nHost: h\r\n\r\n"
    first, second = (await answered(request))[0]
    assert bodies([first]) == [b"body"] and bodies([second]) == [b""]


async def test_a_client_that_waits_for_a_word_before_its_body_gets_it() -> None:
    head = b"POST /body HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"
    written, _ = await answered(head)
    assert written == [b"HTTP/1.1 100 Continue\r\n\r\n"]


CHUNKED = b"POST /whole HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("sent", [b"0\r\n" + 99 * b"a: b\r\n", b"0\r\na: ", b"1;a="])
async def test_trailers_and_sizes_of_chunks_without_an_end_close_the_connection(
    sent: bytes,
) -> None:
    config: uvicorn.Config = server_config(app)
    config.load()
    protocol, packets = GuardedProtocol(config, ServerState(), {}), Packets()
    protocol.connection_made(packets)
    protocol.data_received(CHUNKED + sent)
    await asyncio.sleep(0.02)
    for _ in range(MAX_HEAD_BYTES // 1000 + 1):
        if not packets.closed:
            protocol.data_received(100 * b"a: bcdefg\r\n" if sent[-1:] == b"\n" else 1000 * b"x")
    assert packets.closed
    protocol.connection_lost(None)


async def test_a_body_in_many_chunks_is_read() -> None:
    chunks = 2 * MAX_HEAD_BYTES // 100 * (b"64\r\n" + 100 * b"x" + b"\r\n")
    written, closed = await answered(CHUNKED + chunks + b"0\r\na: b\r\n\r\n")
    assert bodies(written) == [b"body"] and not closed


async def test_a_client_that_is_refused_early_cannot_hold_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("babylon.serving.gateway.http_guard.HEAD_S", 0.05)
    config: uvicorn.Config = server_config(app)
    config.load()
    protocol, packets = GuardedProtocol(config, ServerState(), {}), Packets()
    protocol.connection_made(packets)
    protocol.data_received(b"POST /whole HTTP/1.1\r\ncontent-length: 1000\r\n\r\n")
    await asyncio.sleep(0.02)
    assert packets.written and not packets.closed
    protocol.data_received(b"x")  # ends the wait of keep-alive
    await asyncio.sleep(0.1)
    assert packets.closed
    protocol.connection_lost(None)
