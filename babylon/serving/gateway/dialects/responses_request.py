"""A request to ``POST /v1/responses`` as a chat request.

https://platform.openai.com/docs/api-reference/responses/create
"""

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec
from msgspec import Struct

from babylon.serving.gateway.dialects.converted import (
    Conversation,
    content_of,
    converted,
    kind_of,
    passed_on,
    refuse,
)
from babylon.serving.openai_wire import JsonObject, RequestError

_REMEDIES = {
    "previous_response_id": "send the conversation so far in input; gateways keep none",
    "conversation": "send the conversation so far in input",
    "prompt": "send the prompt itself in instructions and input",
    "background": "leave it out, and wait for the answer or stream it",
    "n": "send one request per answer",
}
# Fields without effect on the tokens here: they concern storage, streaming and OpenAI's tools.
_DROPPED = (
    "client_metadata",
    "context_management",
    "include",
    "max_tool_calls",
    "store",
    "stream_options",
    "truncation",
    *_REMEDIES,
)


class _Asked(Struct, frozen=True, kw_only=True):
    """The fields that are translated; all others stay as they are."""

    input: str | list[JsonObject]
    instructions: str | list[JsonObject] | None = None
    max_output_tokens: int | None = None
    reasoning: JsonObject | None = None
    text: JsonObject | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    include: list[str] | None = None
    stream: bool | None = None
    top_logprobs: int | None = None


class _Message(Struct, frozen=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[JsonObject]


class _FunctionCall(Struct, frozen=True):
    call_id: str
    name: str
    arguments: str


class _FunctionOutput(Struct, frozen=True):
    call_id: str
    output: str | list[JsonObject]


class _Text(Struct, frozen=True):
    text: str


class _Thought(Struct, frozen=True):
    summary: list[_Text] = []
    content: list[_Text] | None = None


class _Image(Struct, frozen=True):
    image_url: str
    detail: str | None = None


class _Function(Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


def chat_request(fields: JsonObject) -> JsonObject:
    """Return the fields of the chat request.

    Raises:
        RequestError: 400, the request is malformed, or asks for what only OpenAI runs.
    """
    refuse(fields, _REMEDIES)
    asked = converted(fields, _Asked, "request")
    chat = passed_on(fields, _Asked, _DROPPED)
    chat["messages"] = _messages(asked)
    chat |= _sampling(asked)
    if asked.tools:
        chat["tools"] = [_tool(tool) for tool in asked.tools]
    choice = asked.tool_choice
    # vLLM refuses a chat that chooses among no tools. OpenAI's Responses take it.
    if choice is not None and (asked.tools or choice not in ("auto", "none")):
        chat["tool_choice"] = _tool_choice(choice)
    return chat


def wants_logprobs(fields: Mapping[str, object]) -> bool:
    """Return True if the client asks for the logprobs of the answer's text."""
    include = fields.get("include")
    named = isinstance(include, list) and "message.output_text.logprobs" in include
    return named or bool(fields.get("top_logprobs"))


def _sampling(asked: _Asked) -> JsonObject:
    chat: JsonObject = {}
    if asked.max_output_tokens is not None:
        chat["max_completion_tokens"] = asked.max_output_tokens
    if effort := (asked.reasoning or {}).get("effort"):
        chat["reasoning_effort"] = effort
    if wants_logprobs(msgspec.structs.asdict(asked)):
        chat["logprobs"] = True
    if asked.top_logprobs:
        chat["top_logprobs"] = asked.top_logprobs
    if verbosity := (asked.text or {}).get("verbosity"):
        chat["verbosity"] = verbosity
    if form := (asked.text or {}).get("format"):
        kind = kind_of(form, ("text", "json_object", "json_schema"), "text.format")
        schema = {name: value for name, value in form.items() if name != "type"}
        chat["response_format"] = {"type": kind, **({"json_schema": schema} if schema else {})}
    return chat


def _messages(asked: _Asked) -> list[JsonObject]:
    """Return the chat's messages: instructions first, then the input's items."""
    chat = Conversation()
    if isinstance(asked.instructions, str):
        chat.add_system(asked.instructions)
    first = asked.instructions if isinstance(asked.instructions, list) else []
    if isinstance(asked.input, str):
        items = [*first, {"role": "user", "content": asked.input}]
    else:
        items = [*first, *asked.input]
    for item in items:
        if item.get("type") == "item_reference":
            raise RequestError(
                400,
                "input item of type 'item_reference': gateways keep no items; send the item itself"
                " (store=false makes clients do so)",
            )
        kind = kind_of(item, _ITEMS, "input item", default="message")
        _ITEMS[kind](chat, item)
    return chat.messages()


def _add_message(chat: Conversation, item: JsonObject) -> None:
    message = converted(item, _Message, "message")
    content = message.content if isinstance(message.content, str) else _content(message.content)
    if message.role == "assistant":
        parts = [content] if isinstance(content, str) else [_text(part) for part in content]
        chat.add_assistant(text="".join(parts))
    elif message.role == "user":
        chat.add({"role": "user", "content": content})
    else:
        chat.add_system(content)


def _add_call(chat: Conversation, item: JsonObject) -> None:
    call = converted(item, _FunctionCall, "function_call")
    function = {"name": call.name, "arguments": call.arguments}
    chat.add_assistant(call={"id": call.call_id, "function": function})


def _add_output(chat: Conversation, item: JsonObject) -> None:
    result = converted(item, _FunctionOutput, "function_call_output")
    content = result.output if isinstance(result.output, str) else _content(result.output)
    chat.add({"role": "tool", "tool_call_id": result.call_id, "content": content})


def _add_thought(chat: Conversation, item: JsonObject) -> None:
    thought = converted(item, _Thought, "reasoning item")
    text = "".join(part.text for part in thought.content or thought.summary)
    if text:
        chat.add_assistant(thought=text)


_ITEMS: dict[str, Callable[[Conversation, JsonObject], None]] = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_output,
    "reasoning": _add_thought,
}


def _content(parts: list[JsonObject]) -> str | list[JsonObject]:
    return content_of([_part(part) for part in parts])


def _part(part: JsonObject) -> JsonObject:
    texts = ("input_text", "output_text", "text", "summary_text")
    kind = kind_of(part, (*texts, "refusal", "input_image"), "content part")
    if kind in texts:
        return {"type": "text", "text": converted(part, _Text, "content part").text}
    if kind == "refusal":
        return {"type": "text", "text": converted(part.get("refusal"), str, "refusal")}
    image = converted(part, _Image, "input_image (by URL)")
    detail = {"detail": image.detail} if image.detail else {}
    return {"type": "image_url", "image_url": {"url": image.image_url, **detail}}


def _text(part: JsonObject) -> str:
    return converted(part, _Text, "content of the assistant").text


def _tool(tool: JsonObject) -> JsonObject:
    if (kind := tool.get("type")) != "function":
        raise RequestError(
            400,
            f"tool of type {kind!r:.80}: gateways run no tools of OpenAI; send tools of type"
            ' function, and switch this one off in the client (Codex: web_search = "disabled")',
        )
    function = converted(tool, _Function, "tool")
    fields = msgspec.structs.asdict(function)
    given = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": given}


def _tool_choice(choice: str | JsonObject) -> str | JsonObject:
    if isinstance(choice, str):
        return choice
    kind_of(choice, ("function",), "tool_choice")
    if not isinstance(name := choice.get("name"), str):
        raise RequestError(400, f"tool_choice {choice!r:.80}: name a function")
    return {"type": "function", "function": {"name": name}}
