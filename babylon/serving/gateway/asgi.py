"""ASGI helpers of the gateway: responses, request bodies, cancellation when a client leaves.

Written by hand: a Starlette response sends itself as a whole, but a call decides after it began
whether its answer ends well, and records it before the last byte.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping
from contextlib import suppress
from typing import Any

from babylon.serving.openai_wire import MAX_BODY_BYTES, RequestError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

EVENT_STREAM: Headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
BODY_S = 30.0
DRAIN_BYTES, DRAIN_S = 4 * MAX_BODY_BYTES, 5.0  # of a body that is too large


class ClientLeft(Exception):
    """The client closed the connection."""


class Response:
    """One response. It has begun once ``status`` is set."""

    def __init__(self, send: Send) -> None:
        self.status: int | None = None
        self.complete = False
        self.send = send

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, body: bytes, *, last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": not last})
        self.complete = last

    async def whole(
        self,
        body: bytes,
        *,
        content_type: bytes = b"application/json",
        status: int = 200,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        about = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        await self.start(status, [*about, *headers])
        await self.write(body, last=True)


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """Read the whole request body.

    Raises:
        RequestError: 413, it is larger than ``MAX_BODY_BYTES``; 408, it did not arrive in time.
        ClientLeft: the client closed the connection.
    """
    announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    length = int(announced)  # uvicorn's parser refuses anything but a number
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(BODY_S):
            while more and max(length, len(body)) <= MAX_BODY_BYTES:
                part, more = await _part(receive)
                body += part
    except TimeoutError as error:
        raise RequestError(408, f"incomplete body after {BODY_S:.0f} s: send faster") from error
    if max(length, len(body)) <= MAX_BODY_BYTES:
        return bytes(body)
    waits = any(name == b"expect" for name, _ in scope["headers"])  # for our word, before it sends
    if more and length <= DRAIN_BYTES and not waits:
        await _drain(receive)
    raise RequestError(413, f"the body is larger than {MAX_BODY_BYTES} bytes: send less")


async def _part(receive: Receive) -> tuple[bytes, bool]:
    """Return the next part of a body, and whether more follows."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientLeft
    return message.get("body", b""), message.get("more_body", False)


async def _drain(receive: Receive) -> None:
    """Read and forget the rest of a body, within limits.

    A connection that is closed with unread bytes is reset, and a client that still sends would see
    that instead of the answer.
    """
    left, more = DRAIN_BYTES, True
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while more and left > 0:
                part, more = await _part(receive)
                left -= len(part)


async def unless_client_leaves(
    receive: Receive, work: Coroutine[object, object, None], limit_s: float
) -> None:
    """Await ``work``, which answers the client, and cancel it when the client leaves.

    ``work`` runs in this task, as under ``asyncio.timeout``. The time limit is part of this
    function because a separate ``asyncio.timeout`` would cost another 2 % of a call.

    Raises:
        ClientLeft: the client closed the connection before ``work`` was done.
        TimeoutError: ``work`` took longer than ``limit_s``.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    working, reason = True, None

    def stop(error: type[Exception]) -> None:
        nonlocal reason
        if working and reason is None:
            reason = error
            task.cancel()

    gone = loop.create_task(_disconnected(receive))
    gone.add_done_callback(lambda _: stop(ClientLeft))
    overdue = loop.call_later(limit_s, stop, TimeoutError)
    try:
        await work
    except asyncio.CancelledError:
        if reason and not task.uncancel():  # cancelled by ``stop``, and by nobody else
            raise reason from None
        raise
    finally:
        working = False
        gone.cancel()
        overdue.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
