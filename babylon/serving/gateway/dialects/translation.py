"""ASGI around the gateway: a call of another dialect goes in as a chat and its answer comes back.

The gateway behind it knows chat completions only. So a call of any dialect has the same checks,
limits and record, and every engine can answer it.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import ClassVar

import msgspec

from babylon.serving.gateway.asgi import Message, Receive, Scope, Send, read_body
from babylon.serving.gateway.event_stream import EventStreamParser, StreamCut
from babylon.serving.gateway.exchange import CHAT
from babylon.serving.openai_wire import JsonObject, decode_object, error_message

_MALFORMED = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
_FORM = "a field has another form than OpenAI's"
TOKENIZE = "/tokenize"  # as at vLLM; counts for all dialects
_decoder = msgspec.json.Decoder(JsonObject)
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Translation(ABC):
    """One call of another dialect. Methods that yield events yield their data with its ``type``.

    ``path`` is that of the dialect, ``chat_path`` that of the gateway's own dialect.
    """

    path: ClassVar[str]
    chat_path: ClassVar[str] = CHAT.path

    @abstractmethod
    def request(self, fields: JsonObject) -> JsonObject:
        """Return the fields of the chat request.

        Raises:
            RequestError: 400, the request is malformed or has no equivalent.
        """

    @abstractmethod
    def whole(self, answer: JsonObject) -> JsonObject:
        """Return the answer to a chat completion."""

    @abstractmethod
    def chunk(self, chunk: JsonObject) -> Iterator[JsonObject]:
        """Yield the events of a chunk of a streamed chat completion."""

    @abstractmethod
    def end(self) -> Iterator[JsonObject]:
        """Yield the events after the last chunk."""

    @abstractmethod
    def error(self, status: int, error: Mapping[str, object]) -> JsonObject:
        """Return the body of an error response; ``error`` is OpenAI's."""

    @abstractmethod
    def error_event(self, error: Mapping[str, object]) -> JsonObject:
        """Return the last event of a stream that failed."""


class Dialects:
    """The ASGI application: ``app``, which answers chats, with more dialects."""

    def __init__(self, app: Application, *translations: Callable[[], Translation]) -> None:
        self._app = app
        self._translations = {make().path: make for make in translations}

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        make = self._translations.get(scope["path"])
        if make is None or scope["method"] != "POST":
            return self._app(scope, receive, send)  # a chat costs no coroutine more than before
        call = make()
        chat = {**scope, "path": call.chat_path}
        translated = _TranslatedSend(call, send)
        return self._app(chat, _translated_receive(call, scope, receive), translated)


def _translated_receive(call: Translation, scope: Scope, receive: Receive) -> Receive:
    """Return a ``receive`` that gives the chat request first.

    The body is read when the gateway asks for it, after it has checked the key.
    """
    pending = True

    async def receive_chat() -> Message:
        nonlocal pending
        if not pending:
            return await receive()
        pending = False
        fields = call.request(decode_object(await read_body(scope, receive)))
        return {"type": "http.request", "body": msgspec.json.encode(fields)}

    return receive_chat


class _TranslatedSend:
    """Translates a response: a whole one when it is complete, a stream event by event."""

    def __init__(self, call: Translation, send: Send) -> None:
        self._call, self._send = call, send
        self._start: Message = {}
        self._parser: EventStreamParser | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            if (b"content-type", b"text/event-stream") in message["headers"]:
                self._parser = EventStreamParser()
                await self._send(message)
        elif self._parser is not None:
            try:
                body = b"".join(_events(self._call, self._parser, message["body"]))
            except _MALFORMED as error:
                raise StreamCut(_FORM) from error  # the gateway records it, and sends an error
            if body or not message["more_body"]:
                await self._send({**message, "body": body})
        else:
            self._body += message["body"]
            if not message["more_body"]:
                await self._send_whole()

    async def _send_whole(self) -> None:
        status = self._start["status"]
        try:
            if status < 400:
                answer = self._call.whole(msgspec.json.decode(self._body))
            else:
                answer = self._call.error(status, _error(self._body))
        except _MALFORMED:
            status = 502
            why = {"message": f"the engine's answer cannot be read: {_FORM}"}
            answer = self._call.error(status, why)
        body = msgspec.json.encode(answer)
        kept = [one for one in self._start["headers"] if one[0] != b"content-length"]
        headers = [*kept, (b"content-length", str(len(body)).encode())]
        await self._send({**self._start, "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _events(call: Translation, parser: EventStreamParser, received: bytes) -> Iterator[bytes]:
    for event in parser.feed(received):
        if not event.data:  # a heartbeat
            yield event.other_lines + b"\n"
        elif event.data == b"[DONE]":
            yield from map(_encoded, call.end())
        elif (chunk := _decoder.decode(event.data)).get("error"):
            yield _encoded(call.error_event(_error(event.data)))
        else:
            yield from map(_encoded, call.chunk(chunk))


def _encoded(data: JsonObject) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (data["type"].encode(), msgspec.json.encode(data))


def _error(body: bytes) -> Mapping[str, object]:
    """Return OpenAI's error object of an error response, whatever the engine's format."""
    try:
        return msgspec.json.decode(body, type=dict[str, dict[str, object]])["error"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return {"message": error_message(body)}
