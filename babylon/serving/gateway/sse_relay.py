"""Relaying a stream of server-sent events while noting what it says."""

from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from babylon.serving.gateway.exchange import Exchange
from babylon.serving.openai_wire import DONE, sse


class StreamCut(Exception):
    """The engine's stream ended before its answer did, or ended in an error."""


async def relay(
    received: AsyncIterator[bytes], exchange: Exchange, write: Callable[[bytes], Awaitable[None]]
) -> bytes:
    """Pass chunks on until the answer's last one. ``received`` may cut events anywhere.

    Returns:
        The end of the stream, with the finish reason and what follows it: the caller sends it
        when the call is recorded.

    Raises:
        StreamCut: there is no end; nothing more will come.
    """
    rest, end = b"", b""
    async for data in received:
        *events, rest = (rest + data).split(b"\n\n")
        passed = b""
        for event in events:
            payload = event.removeprefix(b"data: ")
            if payload == b"[DONE]":
                if exchange.finish_reason is None:
                    raise StreamCut("it has no finish reason")
                return passed + end + DONE
            piece = _piece(payload, exchange)
            if exchange.finish_reason:
                end += piece
            else:
                passed += piece
        if passed:
            await write(passed)
    raise StreamCut("it ended early")


def _piece(payload: bytes, exchange: Exchange) -> bytes:
    chunk = msgspec.json.decode(payload)
    if "error" in chunk:
        raise StreamCut(chunk["error"].get("message"))
    seen = exchange.take(chunk)
    return sse(msgspec.json.encode(seen)) if seen else b""
