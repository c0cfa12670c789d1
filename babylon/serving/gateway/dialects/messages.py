"""Anthropic's Messages API: answers as content blocks, whole and streamed.

https://platform.claude.com/docs/en/build-with-claude/streaming
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

import msgspec

from babylon.serving.gateway.dialects.blocks import Block, BlockChange, BlockReader, blocks_of
from babylon.serving.gateway.dialects.messages_request import chat_request
from babylon.serving.gateway.dialects.translation import TOKENIZE, Translation
from babylon.serving.openai_wire import JsonObject

_STOP = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_SIGNATURE = "unsigned"  # clients send no thought again that has none
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Messages(Translation):
    """One call of ``POST /v1/messages``. The message's id is the call's id."""

    path: ClassVar[str] = "/v1/messages"

    def __init__(self) -> None:
        self._reader = BlockReader()
        self._begun = False
        self._choice: JsonObject = {}  # the last one with a finish reason
        self._usage: JsonObject = {}
        self._calls_tools = False

    def request(self, fields: JsonObject) -> JsonObject:
        return chat_request(fields)

    def whole(self, answer: JsonObject) -> JsonObject:
        self._choice = (answer.get("choices") or [{}])[0]
        self._usage = answer.get("usage") or {}
        self._calls_tools = bool((self._choice.get("message") or {}).get("tool_calls"))
        content = [_content(block) for block in blocks_of(self._choice)]
        return self._message(answer) | {"content": content, **self._stop()}

    def chunk(self, chunk: JsonObject) -> Iterator[JsonObject]:
        if not self._begun:
            self._begun = True
            yield {"type": "message_start", "message": self._message(chunk)}
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            self._calls_tools |= bool((choice.get("delta") or {}).get("tool_calls"))
            for change in self._reader.read(choice):
                yield from _events(change)
            if choice.get("finish_reason"):
                self._choice = choice

    def end(self) -> Iterator[JsonObject]:
        for change in self._reader.end():
            yield from _events(change)
        yield {"type": "message_delta", "delta": self._stop(), "usage": self._counts()}
        yield {"type": "message_stop"}

    def error(self, status: int, error: Mapping[str, object]) -> JsonObject:
        kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
        stated = {"type": kind, "message": str(error.get("message"))}
        return {"type": "error", "error": stated}

    def error_event(self, error: Mapping[str, object]) -> JsonObject:
        return self.error(500, error)

    def _message(self, answer: JsonObject) -> JsonObject:
        return {
            "id": answer.get("id"),
            "type": "message",
            "role": "assistant",
            "model": answer.get("model"),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._counts(),
        }

    def _stop(self) -> JsonObject:
        """Return the reason of the end. Engines name the stop sequence in ``stop_reason``."""
        sequence = self._choice.get("stop_reason")
        if self._choice.get("finish_reason") == "stop" and isinstance(sequence, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
        reason = _STOP.get(self._choice.get("finish_reason") or "", "end_turn")
        if reason == "end_turn" and self._calls_tools:  # vLLM says so of a tool that was demanded
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": None}

    def _counts(self) -> JsonObject:
        """Return the usage; 0 for both in the first event, since it comes last in a chat."""
        cached = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return {
            "input_tokens": self._usage.get("prompt_tokens", 0) - cached,
            "output_tokens": self._usage.get("completion_tokens", 0),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }


class MessageTokens(Messages):
    """One call of ``POST /v1/messages/count_tokens``."""

    path: ClassVar[str] = "/v1/messages/count_tokens"
    chat_path: ClassVar[str] = TOKENIZE

    def whole(self, answer: JsonObject) -> JsonObject:
        return {"input_tokens": answer["count"]}


def _content(block: Block) -> JsonObject:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": _SIGNATURE}
        case "call":
            used = {"id": block.call_id, "name": block.name, "input": _input(block.text)}
            return {"type": "tool_use", **used}


def _input(arguments: str) -> JsonObject:
    """Return a call's arguments; those that are no JSON object as text, for the agent to refuse."""
    try:
        return msgspec.json.decode(arguments or "{}", type=JsonObject)
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": arguments}


def _events(change: BlockChange) -> Iterator[JsonObject]:
    if change.block.kind == "call" and change.what == "add":
        return  # Anthropic's client fails on arguments that turn out to be no JSON
    if change.what == "end" and change.block.kind == "call":
        arguments = msgspec.json.encode(_input(change.block.text)).decode()
        yield _event(BlockChange(what="add", block=change.block, added=arguments))
    if change.what == "end" and change.block.kind == "reasoning":
        signed = {"type": "signature_delta", "signature": _SIGNATURE}
        yield {"type": "content_block_delta", "index": change.block.index, "delta": signed}
    yield _event(change)


def _event(change: BlockChange) -> JsonObject:
    block, index = change.block, change.block.index
    if change.what == "end":
        return {"type": "content_block_stop", "index": index}
    if change.what == "begin":
        begun = Block(kind=block.kind, index=index, call_id=block.call_id, name=block.name)
        return {"type": "content_block_start", "index": index, "content_block": _content(begun)}
    name, kind = {
        "text": ("text", "text_delta"),
        "reasoning": ("thinking", "thinking_delta"),
        "call": ("partial_json", "input_json_delta"),
    }[block.kind]
    delta = {"type": kind, name: change.added}
    return {"type": "content_block_delta", "index": index, "delta": delta}
