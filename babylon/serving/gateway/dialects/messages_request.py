"""A request to ``POST /v1/messages`` as a chat request.

https://platform.claude.com/docs/en/api/messages
"""

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
    "mcp_servers": "connect the agent to the MCP server and give its tools in tools",
    "container": "run the code in the agent, as a tool",
    "n": "send one request per answer",
}
# Fields without effect on the tokens here, beside those that ``_Asked`` names: no old results of
# tools are cleared, so the policy reads the whole prompt.
_DROPPED = (
    "cache_control",
    "context_management",
    "diagnostics",
    "inference_geo",
    "service_tier",
    "speed",
    *_REMEDIES,
)
_BILLING = "x-anthropic-billing-header:"  # of Claude Code, new in each request
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _User(Struct, frozen=True):
    user_id: str | None = None


class _Asked(Struct, frozen=True, kw_only=True):
    """The fields that are translated; all others stay as they are."""

    messages: list["_Turn"]
    system: str | list[JsonObject] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: _User | None = None
    tools: list[JsonObject] | None = None
    tool_choice: JsonObject | None = None
    thinking: JsonObject | None = None
    output_config: JsonObject | None = None
    output_format: JsonObject | None = None


class _Turn(Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[JsonObject]


class _Text(Struct, frozen=True):
    text: str


class _Thinking(Struct, frozen=True):
    thinking: str


class _ToolUse(Struct, frozen=True):
    id: str
    name: str
    input: JsonObject


class _ToolResult(Struct, frozen=True):
    tool_use_id: str
    content: str | list[JsonObject] | None = None


class _Source(Struct, frozen=True):
    type: Literal["base64", "url"]
    media_type: str = ""
    data: str = ""
    url: str = ""


class _Image(Struct, frozen=True):
    source: _Source


class _Tool(Struct, frozen=True):
    name: str
    input_schema: JsonObject
    description: str | None = None
    strict: bool | None = None


def chat_request(fields: JsonObject) -> JsonObject:
    """Return the fields of the chat request.

    Raises:
        RequestError: 400, the request is malformed, or asks for what only Anthropic runs.
    """
    refuse(fields, _REMEDIES)
    asked = converted(fields, _Asked, "request")
    chat = passed_on(fields, _Asked, _DROPPED)
    chat["messages"] = _messages(asked)
    if asked.stop_sequences:
        chat["stop"] = asked.stop_sequences
    if asked.metadata and asked.metadata.user_id:
        chat["user"] = asked.metadata.user_id
    if asked.tools:
        chat["tools"] = [_tool(tool) for tool in asked.tools]
    if asked.tool_choice:
        chat |= _tool_choice(asked.tool_choice)
    if asked.thinking:  # without its budget, which would force the end of a thought
        kind = kind_of(asked.thinking, ("enabled", "adaptive", "disabled"), "thinking")
        chat["chat_template_kwargs"] = {"enable_thinking": kind != "disabled"}
    chat |= _output(asked)
    return chat


def _output(asked: _Asked) -> JsonObject:
    chat: JsonObject = {}
    config = asked.output_config or {}
    if effort := config.get("effort"):
        chat["reasoning_effort"] = effort
    if form := asked.output_format or config.get("format"):
        kind_of(form, ("json_schema",), "output format")
        schema = {"name": "answer", "schema": form.get("schema")}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat


def _messages(asked: _Asked) -> list[JsonObject]:
    if asked.messages and asked.messages[-1].role == "assistant":
        raise RequestError(
            400, "the last message is the assistant's (prefill): end with a message of the user"
        )
    chat = Conversation()
    if system := _instructions(asked.system or ""):
        chat.add_system(system)
    for turn in asked.messages:
        if turn.role == "system":
            chat.add_system(_content(turn.content))
        elif isinstance(turn.content, str):
            chat.add({"role": turn.role, "content": turn.content})
        elif turn.role == "assistant":
            _add_assistant(chat, turn.content)
        else:
            _add_user(chat, turn)
    return chat.messages()


def _instructions(system: str | list[JsonObject]) -> str | list[JsonObject]:
    if isinstance(system, str):
        return system
    return _content([one for one in system if not str(one.get("text")).startswith(_BILLING)])


def _add_assistant(chat: Conversation, blocks: list[JsonObject]) -> None:
    turn = Conversation(one_turn=True)  # it does not go on with the turn before
    for block in blocks:
        kind = kind_of(block, ("text", "tool_use", "thinking"), "assistant content")
        if kind == "text":
            turn.add_assistant(text=converted(block, _Text, kind).text)
        elif kind == "thinking":
            thought = converted(block, _Thinking, kind).thinking
            turn.add_assistant(thought=thought)
        else:
            use = converted(block, _ToolUse, kind)
            arguments = msgspec.json.encode(use.input).decode()
            function = {"name": use.name, "arguments": arguments}
            turn.add_assistant(call={"id": use.id, "function": function})
    for message in turn.messages():
        chat.add(message)


def _add_user(chat: Conversation, turn: _Turn) -> None:
    """Add the results of tools, each as a message, then the rest of the turn."""
    assert not isinstance(turn.content, str)
    rest = []
    for block in turn.content:
        if block.get("type") != "tool_result":
            rest.append(block)
            continue
        result = converted(block, _ToolResult, "tool_result")
        said = _content(result.content or "")
        chat.add({"role": "tool", "tool_call_id": result.tool_use_id, "content": said})
    if rest:
        chat.add({"role": "user", "content": _content(rest)})


def _content(parts: str | list[JsonObject]) -> str | list[JsonObject]:
    return parts if isinstance(parts, str) else content_of([_part(part) for part in parts])


def _part(part: JsonObject) -> JsonObject:
    if kind_of(part, ("text", "image"), "content") == "text":
        return {"type": "text", "text": converted(part, _Text, "text").text}
    source = converted(part, _Image, "image").source
    url = source.url or f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _tool(tool: JsonObject) -> JsonObject:
    kind_of(tool, ("custom",), "tool", default="custom")
    given = converted(tool, _Tool, "tool")
    function: JsonObject = {"name": given.name, "parameters": given.input_schema}
    for name, value in (("description", given.description), ("strict", given.strict)):
        if value is not None:
            function[name] = value
    return {"type": "function", "function": function}


def _tool_choice(choice: JsonObject) -> JsonObject:
    kind = kind_of(choice, (*_CHOICES, "tool"), "tool_choice")
    chat: JsonObject = {"tool_choice": _CHOICES.get(kind)}
    if kind == "tool":
        name = converted(choice.get("name"), str, "tool_choice.name")
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    return chat
