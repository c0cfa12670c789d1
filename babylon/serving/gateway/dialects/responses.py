"""The Responses API: answers as output items, whole and streamed.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

import time
from collections.abc import Iterator, Mapping
from typing import ClassVar

from babylon.serving.gateway.dialects.blocks import Block, BlockChange, BlockReader, Kind, blocks_of
from babylon.serving.gateway.dialects.responses_request import chat_request, wants_logprobs
from babylon.serving.gateway.dialects.translation import TOKENIZE, Translation
from babylon.serving.openai_wire import JsonObject

_ECHOED: JsonObject = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ADDED: dict[Kind, str] = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


class Responses(Translation):
    """One call of ``POST /v1/responses``. The response's id is the call's id."""

    path: ClassVar[str] = "/v1/responses"

    def __init__(self) -> None:
        self._echoed = _ECHOED
        self._logprobs = False
        self._head: JsonObject = {}
        self._reader = BlockReader()
        self._finish_reason: str | None = None
        self._usage: JsonObject | None = None
        self._sent = 0

    def request(self, fields: JsonObject) -> JsonObject:
        chat = chat_request(fields)
        given = {name: fields[name] for name in _ECHOED if fields.get(name) is not None}
        self._echoed, self._logprobs = _ECHOED | given, wants_logprobs(fields)
        return chat

    def whole(self, answer: JsonObject) -> JsonObject:
        self._reader.blocks = blocks_of((answer.get("choices") or [{}])[0])
        self._note(answer)
        return self._response()

    def chunk(self, chunk: JsonObject) -> Iterator[JsonObject]:
        if not self._head:
            self._note(chunk)
            for event in ("response.created", "response.in_progress"):
                yield self._event(event, response=self._response("in_progress"))
        self._note(chunk)
        for choice in chunk.get("choices") or ():
            for change in self._reader.read(choice):
                yield from self._changed(change)

    def end(self) -> Iterator[JsonObject]:
        for change in self._reader.end():
            yield from self._changed(change)
        response = self._response()
        yield self._event(f"response.{response['status']}", response=response)

    def error(self, status: int, error: Mapping[str, object]) -> JsonObject:
        return {"error": error}

    def error_event(self, error: Mapping[str, object]) -> JsonObject:
        """Return the event ``error``; OpenAI's clients raise its field ``error``."""
        stated = {name: error.get(name) for name in ("message", "code", "param")}
        return self._event("error", **stated, error=error)

    def _note(self, answer: JsonObject) -> None:
        self._head = {
            "id": answer.get("id"),
            "object": "response",
            "created_at": answer.get("created") or int(time.time()),
            "model": answer.get("model"),
        }
        self._usage = answer.get("usage") or self._usage
        for choice in answer.get("choices") or ():
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def _response(self, status: str | None = None) -> JsonObject:
        reason = _INCOMPLETE.get(self._finish_reason or "")
        done = "incomplete" if reason else "completed"
        return {
            **self._head,
            "status": status or done,
            "error": None,
            "incomplete_details": {"reason": reason} if reason else None,
            "output": [] if status else [self._item(block, done) for block in self._reader.blocks],
            "previous_response_id": None,
            "store": False,
            "usage": None if status else _usage(self._usage),
            **self._echoed,
        }

    def _item(self, block: Block, status: str) -> JsonObject:
        last = block.index == len(self._reader.blocks) - 1
        item: JsonObject = {
            "id": f"{block.kind}_{self._head['id']}_{block.index}",
            "type": "message",
            "status": status if last else "completed",
        }
        match block.kind:
            case "call":
                of_call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
                return item | {"type": "function_call", **of_call}
            case "reasoning":
                return item | {"type": "reasoning", "summary": [], "content": [self._part(block)]}
            case "text":
                return item | {"role": "assistant", "content": [self._part(block)]}

    def _part(self, block: Block) -> JsonObject:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        logprobs = block.logprobs if self._logprobs else []
        return {
            "type": "output_text",
            "text": block.text,
            "annotations": [],
            "logprobs": logprobs,
        }

    def _changed(self, change: BlockChange) -> Iterator[JsonObject]:
        """Yield the events of a change. Items and parts begin empty and end whole."""
        block, kind = change.block, _ADDED[change.block.kind]
        item = self._item(block, "in_progress")
        place = {"item_id": item["id"], "output_index": block.index}
        in_part = {} if block.kind == "call" else {"content_index": 0}
        text = block.kind == "text"
        match change.what:
            case "begin":
                empty: JsonObject = {"content": []} if in_part else {"arguments": ""}
                yield self._event(
                    "response.output_item.added", output_index=block.index, item=item | empty
                )
                if in_part:
                    part = self._part(Block(kind=block.kind, index=block.index))
                    yield self._event("response.content_part.added", **place, **in_part, part=part)
            case "add":
                scores = {"logprobs": change.logprobs if self._logprobs else []} if text else {}
                yield self._event(f"{kind}.delta", **place, **in_part, delta=change.added, **scores)
            case "end":
                yield from self._ended(block, kind, place | in_part)

    def _ended(self, block: Block, kind: str, place: JsonObject) -> Iterator[JsonObject]:
        if block.kind == "call":
            said = {"name": block.name, "arguments": block.text}
        else:
            part = self._part(block)
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
        yield self._event(f"{kind}.done", **place, **said)
        if block.kind != "call":
            yield self._event("response.content_part.done", **place, part=part)
        status = "incomplete" if self._finish_reason in _INCOMPLETE else "completed"
        item = self._item(block, status)
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, **fields: object) -> JsonObject:
        event = {"type": kind, "sequence_number": self._sent, **fields}
        self._sent += 1
        return event


class ResponseTokens(Responses):
    """One call of ``POST /v1/responses/input_tokens``."""

    path: ClassVar[str] = "/v1/responses/input_tokens"
    chat_path: ClassVar[str] = TOKENIZE

    def whole(self, answer: JsonObject) -> JsonObject:
        return {"object": "response.input_tokens", "input_tokens": answer["count"]}


def _usage(usage: JsonObject | None) -> JsonObject | None:
    if not usage:
        return None
    before, after = (usage.get(f"{part}_tokens_details") or {} for part in ("prompt", "completion"))
    return {
        "input_tokens": usage.get("prompt_tokens", 0),
        "input_tokens_details": {
            "cached_tokens": before.get("cached_tokens") or 0,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.get("completion_tokens", 0),
        "output_tokens_details": {"reasoning_tokens": after.get("reasoning_tokens") or 0},
        "total_tokens": usage.get("total_tokens", 0),
    }
