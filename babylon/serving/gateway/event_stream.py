"""Incremental parser of server-sent events, as the standard defines them.

https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream

Written by hand because the libraries (httpx-sse, aiosseclient, sseclient-py, openai's SSEDecoder)
drop the comments, which the gateway relays, and some accept only decoded text.
"""

from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from msgspec import Struct

from babylon.serving.gateway.exchange import Exchange
from babylon.serving.openai_wire import DONE, JsonObject, sse

_BOM = b"\xef\xbb\xbf"


class ServerSentEvent(Struct, frozen=True):
    """One block of lines, up to its blank line.

    ``data`` joins the values of the ``data`` fields with LF; ``None`` if there is no such field.
    ``other_lines`` are the comments and all other fields as received, each ended with LF.
    """

    data: bytes | None
    other_lines: bytes


class EventStreamParser:
    """Accepts bytes cut at any place. Lines end with LF, CR LF or CR."""

    def __init__(self) -> None:
        self._partial_line = b""
        self._ended_with_cr = False
        self._bom = _BOM  # of the first line; empty after it
        self._data: bytes | None = None
        self._other_lines = b""

    def feed(self, received: bytes) -> list[ServerSentEvent]:
        """Return the events that end within ``received``.

        An event without its blank line at the end of the stream is never returned.
        """
        # A CR ends a line at once, without a look at the next byte, so that no event waits for the
        # chunk after it. An LF that comes next belongs to that line end.
        if self._ended_with_cr and received:
            received, self._ended_with_cr = received.removeprefix(b"\n"), False
        if not received:
            return []
        buffered = self._partial_line + received
        lines = buffered.splitlines()  # of bytes: at LF, CR LF and CR only
        self._partial_line = b"" if buffered.endswith((b"\n", b"\r")) else lines.pop()
        self._ended_with_cr = buffered.endswith(b"\r")
        events = []
        for line in lines:
            if self._bom:
                line, self._bom = line.removeprefix(self._bom), b""
            if line.startswith(b"data:") or line == b"data":
                value = line[6:] if line.startswith(b"data: ") else line[5:]
                self._data = value if self._data is None else self._data + b"\n" + value
            elif line:
                self._other_lines += line + b"\n"
            elif self._data is not None or self._other_lines:
                events.append(ServerSentEvent(self._data, self._other_lines))
                self._data, self._other_lines = None, b""
        return events


_decoder = msgspec.json.Decoder(JsonObject)


class StreamCut(Exception):
    """The engine's answer ended too early, reported an error, or is none.

    ``quoted``: the engine's own words. They may repeat the prompt, so only the client gets them.
    """

    def __init__(self, reason: str, quoted: object = None) -> None:
        super().__init__(reason)
        self.quoted = quoted


def decoded(data: bytes) -> JsonObject:
    """Return an answer or a chunk of it.

    Raises:
        StreamCut: it is not a JSON object, or too deep.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StreamCut(f"it is not a JSON object: {error}") from error


def noted(answer: JsonObject, exchange: Exchange) -> JsonObject | None:
    """Note an answer or a chunk of it as ``Exchange.note`` does.

    Raises:
        StreamCut: it has JSON of another type where an answer has objects, lists or text.
    """
    try:
        return exchange.note(answer)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise StreamCut(f"it has another form than OpenAI's: {error}") from error


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
        StreamCut: the stream ended without its last event or with an error, or an event's data is
            not a JSON object.
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
            if exchange.ended:  # held back: an answer ends only after it is recorded
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
    chunk = decoded(event.data)
    if error := chunk.get("error"):
        quoted = error.get("message") if isinstance(error, dict) else error
        raise StreamCut("it ends with an error", quoted)
    seen = noted(chunk, exchange)
    return event.other_lines + sse(msgspec.json.encode(seen)) if seen else b""
