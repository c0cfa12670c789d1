"""Limits for hostile or unreachable HTTP clients that uvicorn does not have.

A request's head must be small and arrive in time (slowloris), and its trailers must be small. A
client that does not read its answer is disconnected, and one that was answered early must end its
request in time. A response leaves in as few packets as possible.
"""

import asyncio
import resource
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 2**16
HEAD_S = 20.0  # from the connection, or the first byte of a later request, to the headers' end
STALL_S = 30.0  # without a read while the write buffer is full
MAX_FILES = 2**17
FILES_FOR_CALLS = 2048
STOP_S = 10  # that running calls have when the gateway stops
KEEP_ALIVE_S = 75  # longer than usual clients keep idle connections, so that they close them first
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class GuardedProtocol(HttpToolsProtocol):
    """One connection with these limits."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_head, self._head_bytes, self._chunk, self._refused = False, 0, 0, False
        self._bodiless = 0  # bytes since the last of a body: sizes of chunks, and trailers
        self._stalled: asyncio.TimerHandle | None = None
        self._overdue: asyncio.TimerHandle | None = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._overdue, self._stalled):
            if timer:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._chunk = len(data)
        self._head_bytes += self._chunk
        self._bodiless += self._chunk
        super().data_received(data)
        if not self._in_head and self._bodiless > MAX_HEAD_BYTES:
            self.transport.abort()
        if self._in_head and not self.transport.is_closing():
            self._expect_head()
            if self._head_bytes > MAX_HEAD_BYTES:  # without the chunk in which the head began
                self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._begun_in = self._chunk

    def on_body(self, body: bytes) -> None:
        self._bodiless = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bodiless = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body:  # refused early: the client must not hold the connection
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._in_head, self._bodiless = False, 0
        if self._head_bytes + self._begun_in > MAX_HEAD_BYTES:  # possibly too large: count exactly
            head = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if head > MAX_HEAD_BYTES:
                self._refused = True
                raise ValueError("head too large")  # ends the parsing; uvicorn answers and closes
        if self._overdue:
            self._overdue.cancel()
            self._overdue = None
        super().on_headers_complete()
        self.cycle.transport = cast(asyncio.Transport, _OneWrite(self.loop, self.transport))

    def send_400_response(self, msg: str) -> None:
        if self._refused:
            self._refuse_head()
        else:
            super().send_400_response(msg)

    def _refuse_head(self) -> None:
        self.transport.write(_TOO_LARGE)
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled:
            self._stalled.cancel()
            self._stalled = None

    def _expect_head(self) -> None:
        if self._overdue is None:
            self._overdue = self.loop.call_later(HEAD_S, self.transport.abort)


class _OneWrite:
    """The transport of one response, which writes its head with what follows at once.

    uvicorn writes them one after the other. Each write is a packet, and wakes the client.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop, self._transport = loop, transport
        self._head: bytes | None = None
        self._alone: asyncio.Handle | None = None  # set while the head waits
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if self._head is None:
            self._head = data
            self._alone = self._loop.call_soon(self._write_head)
        elif self._alone:
            self._write_head(data)
        else:
            self._transport.write(data)

    def close(self) -> None:
        if self._alone:
            self._write_head()
        self._transport.close()

    def _write_head(self, body: bytes = b"") -> None:
        assert self._head is not None and self._alone is not None
        self._alone.cancel()
        self._alone = None
        self._transport.write(self._head + body)


def raise_file_limit() -> None:
    """Raise this process's limit of open files as far as it is allowed to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if wanted > soft:
        with suppress(ValueError, OSError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def server_config(app: Callable[..., Awaitable[None]], **options: Any) -> uvicorn.Config:
    """Return the uvicorn configuration of the gateway."""
    # A connection takes a file, and a running call a second one, to the engine. Most connections
    # are idle: clients keep them for their next call.
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = files - min(files // 2, FILES_FOR_CALLS)
    return uvicorn.Config(
        app,
        http=GuardedProtocol,
        interface="asgi3",  # an application whose call returns an awaitable is not recognised
        lifespan="off",
        ws="none",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=max(32, connections),
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_S,
        log_config=None,
        **options,
    )
