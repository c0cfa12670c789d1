"""HTTP/1.1 connections to engines: one request at a time, then kept for the next one.

Written by hand on httptools, the parser of the gateway's own server, because aiohttp's client took
a quarter of a call's processor time. Pipelining, redirects, cookies, proxies and compression are
left out: no engine needs them.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from types import TracebackType
from urllib.parse import urlsplit

import httptools

CONNECT_S = 5.0
KEPT_S = 15.0  # without a request; servers close idle connections later than that, or tell us
MAX_UNREAD = 2**18  # bytes of an answer; more wait in the sockets until these are read
_Origin = tuple[str, int, bool]


class EngineResponse:
    """An engine's response. ``begun``: bytes read ahead; ``ended`` is called when it is closed."""

    def __init__(self, connection: "_Connection") -> None:
        self.status = 0  # until the head has arrived
        self.begun = b""
        self.ended: Callable[[], None] = lambda: None
        self.complete = self.measured = False  # ``measured``: its end does not need a closed socket
        self.unread: list[bytes] = []
        self._connection = connection

    async def __aenter__(self) -> "EngineResponse":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.ended()
        self.close()

    async def readany(self, limit_s: float | None = None) -> bytes:
        """Return what has arrived, else what arrives next; nothing at the end.

        Raises:
            ConnectionError: the answer broke off.
            TimeoutError: nothing arrived for ``limit_s``.
        """
        while not self.unread and not self.complete:
            await self._connection.arrival(limit_s)
        data = b"".join(self.unread)
        self.unread.clear()
        return data

    async def read(self) -> bytes:
        """Return the rest of the body, as ``readany`` does."""
        parts = []
        while part := await self.readany():
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        """Leave the connection to the next request, or cut it if the answer is not complete."""
        self._connection.leave(self)


class _Connection(asyncio.Protocol):
    """One connection. The parser calls the methods ``on_*``."""

    def __init__(self, idle: "deque[_Connection]") -> None:
        self.idle_since = 0.0
        self.error: ConnectionError | None = None
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._response: EngineResponse | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._limit_s = self._waits_since = 0.0
        self._overdue: asyncio.TimerHandle | None = None
        self._unread = 0
        self._paused = self._reusable = False

    async def ask(self, request: bytes) -> EngineResponse:
        """Send a request and return with the head of its answer."""
        self._response = response = EngineResponse(self)
        self._reusable = False
        self._transport.write(request)
        try:
            while not response.status:
                await self.arrival(None)
        except BaseException:
            self._transport.abort()
            raise
        return response

    async def arrival(self, limit_s: float | None) -> None:
        """Wait until something arrives; see ``EngineResponse.readany``."""
        if self.error:
            raise self.error
        self._unread = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        self._waiter = self._loop.create_future()
        if limit_s:
            # One timer for all waits of an answer: setting one for each chunk costs more.
            self._limit_s, self._waits_since = limit_s, self._loop.time()
            self._overdue = self._overdue or self._loop.call_later(limit_s, self._check_limit)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def leave(self, response: EngineResponse) -> None:
        if self._response is not response:  # left before
            return
        self._response = None
        if self._overdue:
            self._overdue.cancel()
            self._overdue = None
        if self._reusable and not self.error:
            if self._paused:
                self._paused = False
                self._transport.resume_reading()
            self._unread = 0
            self.idle_since = self._loop.time()
            self._idle.append(self)
        else:
            self.abort()

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"this is no HTTP response: {error}")
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        response = self._response
        if exc is None and response and response.status and not response.measured:
            response.complete = True
        self._fail(str(exc or "the engine closed the connection"))
        self._wake()

    def on_message_begin(self) -> None:
        if self._response is None or self._response.complete:
            raise ValueError("nothing was asked")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._response and name.lower() in (b"content-length", b"transfer-encoding"):
            self._response.measured = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._response and status >= 200:  # others announce the answer
            self._response.status = status

    def on_body(self, body: bytes) -> None:
        if self._response:
            self._response.unread.append(body)
            self._unread += len(body)
            if self._unread > MAX_UNREAD and not self._paused:
                self._paused = True
                self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._response and self._response.status:
            self._response.complete = True
            self._reusable = self._parser.should_keep_alive()

    def _fail(self, reason: str) -> None:
        self.error = self.error or ConnectionError(reason)
        self._transport.abort()

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_limit(self) -> None:
        self._overdue = None
        if self._waiter and not self._waiter.done():
            left_s = self._waits_since + self._limit_s - self._loop.time()
            if left_s <= 0:
                message = f"nothing arrived for {self._limit_s:.0f} s"
                self._waiter.set_exception(TimeoutError(message))
            else:
                self._overdue = self._loop.call_later(left_s, self._check_limit)


class EngineConnections:
    """Connections of one process to all engines."""

    def __init__(self) -> None:
        self._idle: dict[_Origin, deque[_Connection]] = {}
        self._tls: ssl.SSLContext | None = None

    async def ask(
        self, method: str, url: str, headers: str, body: bytes = b"", *, fresh: bool = False
    ) -> EngineResponse:
        """Send a request and return with the head of its answer. The caller closes it.

        Args:
            headers: lines with their ends, without Host and Content-Length.
            fresh: make a connection, because one that was kept may be closed at the other end.

        Raises:
            OSError: no answer. It is a ``ConnectionError`` if the connection was refused or lost,
                and a ``TimeoutError`` if none could be made in time.
        """
        origin, host, path = _place(url)
        connection = None if fresh else self._kept(origin)
        head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{headers}"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        return await (connection or await self._connect(origin)).ask(request)

    def close(self) -> None:
        """Close the connections that carry no request."""
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
            idle.clear()

    def _kept(self, origin: _Origin) -> _Connection | None:
        """Return the connection that was used last; drop those that rested for too long."""
        idle = self._idle.setdefault(origin, deque())
        oldest = asyncio.get_running_loop().time() - KEPT_S
        while idle and (idle[0].error or idle[0].idle_since < oldest):
            idle.popleft().abort()
        while idle:
            if not (connection := idle.pop()).error:
                return connection
        return None

    async def _connect(self, origin: _Origin) -> _Connection:
        host, port, secure = origin
        if secure and self._tls is None:
            self._tls = ssl.create_default_context()
        idle = self._idle.setdefault(origin, deque())
        async with asyncio.timeout(CONNECT_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(idle), host, port, ssl=self._tls if secure else None
            )
        return connection


@lru_cache(maxsize=32)  # calls share few URLs, and each policy is loaded by one of its own
def _place(url: str) -> tuple[_Origin, str, str]:
    """Return the origin, the Host header and the path of a URL."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    origin = parts.hostname or "", parts.port or (443 if secure else 80), secure
    return origin, parts.netloc.rpartition("@")[2], parts.path or "/"
