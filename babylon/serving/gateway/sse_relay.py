"""Relay of a streamed answer from the engine to the client."""

from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from babylon.serving.gateway.event_stream import EventStreamParser, ServerSentEvent
from babylon.serving.gateway.exchange import Exchange
from babylon.serving.openai_wire import DONE, JsonObject, sse

_decoder = msgspec.json.Decoder(JsonObject)


class StreamCut(Exception):
    """The engine's stream ended before its answer did, or reported an error."""


async def relay(
    received: AsyncIterator[bytes], exchange: Exchange, write: Callable[[bytes], Awaitable[None]]
) -> bytes:
    """Write the events of an answer until its finish reason, and note them in the exchange.

    Args:
        received: the engine's bytes, cut at any place.

    Returns:
        The rest of the stream, from the event with the finish reason on. The caller sends it after
        the call is recorded.

    Raises:
        StreamCut: the stream ended without its last event, or with an error.
        DecodeError: an event's data is not a JSON object.
    """
    parser, end = EventStreamParser(), b""
    async for data in received:
        passed = b""
        for event in parser.feed(data):
            if event.data == b"[DONE]":
                if exchange.finish_reason is None:
                    raise StreamCut("it has no finish reason")
                return passed + end + event.other_lines + DONE
            piece = _for_client(event, exchange)
            if exchange.finish_reason:
                end += piece
            else:
                passed += piece
        if passed:
            await write(passed)
    raise StreamCut("it ended early")


def _for_client(event: ServerSentEvent, exchange: Exchange) -> bytes:
    """Return the event as the client may see it; empty if the client did not ask for it."""
    if not event.data:  # comments, or a heartbeat with empty data, which is not JSON
        return event.other_lines and event.other_lines + b"\n"
    chunk = _decoder.decode(event.data)
    if error := chunk.get("error"):
        raise StreamCut(error.get("message") if isinstance(error, dict) else str(error))
    seen = exchange.note(chunk)
    return event.other_lines + sse(msgspec.json.encode(seen)) if seen else b""
