"""Chat messages as columns, and back: what a column cannot say stays whole in ``raw_json``."""

from collections.abc import Mapping
from typing import Any

import msgspec

from babylon.core.llm_calls import JsonObject, Message, content_text
from babylon.core.trajectories import Call

_encode = msgspec.json.Encoder().encode
_PLAIN = {"role", "content"}
_NAMES = ("tool_calls", "tool_call_id", "reasoning")


def message_column(message: Message) -> dict[str, Any]:
    """Return the message as ``schema.MESSAGE``."""
    if message.keys() == _PLAIN and all(isinstance(one, str) for one in message.values()):
        return message
    content = message.get("content")
    column: dict[str, Any] = {
        "role": str(message.get("role")),
        "content": content if isinstance(content, str | None) else content_text(message),
        **{name: message.get(name) for name in _NAMES},
    }
    calls = column["tool_calls"]
    fits = isinstance(calls, list | None) and all(map(_is_tool_call, calls or ()))
    texts = all(isinstance(column[name], str | None) for name in _NAMES[1:])
    if not fits or not texts or message_of(column) != message:
        raw = _encode(message).decode()
        return {"role": column["role"], "content": column["content"], "raw_json": raw}
    return column


def _is_tool_call(call: object) -> bool:
    if not isinstance(call, dict) or call.keys() != {"id", "type", "function"}:
        return False
    function = call["function"]
    return (
        isinstance(function, dict)
        and function.keys() == {"name", "arguments"}
        and all(isinstance(one, str) for one in (call["id"], call["type"], *function.values()))
    )


def message_of(column: Mapping[str, Any]) -> Message:
    """Return the message that was sent.

    Scrubbing may have replaced ``raw_json`` by the name of a rule: then its role and text are left.
    """
    raw = column.get("raw_json")
    if raw and isinstance(message := msgspec.json.decode(raw), dict):
        return message
    more = {name: column[name] for name in _NAMES if column.get(name) is not None}
    return {"role": column["role"], "content": column["content"], **more}


def call_column(call: Call) -> dict[str, Any]:
    """Return a call as ``schema.CALL``."""
    return {
        "step": call.step,
        "prompt": [message_column(message) for message in call.messages],
        "completion": [message_column(call.answer)],
        "tools_json": _encode(call.tools).decode() if call.tools else None,
        "temperature": call.temperature,
        "top_p": call.top_p,
        "policy_version": call.policy_version,
        "untrainable": call.untrainable,
        "prompt_token_ids": call.prompt_token_ids,
        "completion_token_ids": call.completion_token_ids,
        "logprobs": call.logprobs,
    }


def call_of(column: Mapping[str, Any]) -> Call:
    """Return the call that ``call_column`` wrote."""
    answer = message_of(column["completion"][0])
    tools = msgspec.json.decode(column["tools_json"] or "[]")
    ids: dict[str, Any] = {
        name: None if column[name] is None else tuple(column[name])
        for name in ("prompt_token_ids", "completion_token_ids", "logprobs")
    }
    return Call(
        step=column["step"],
        messages=tuple(message_of(message) for message in column["prompt"]),
        response=content_text(answer),
        temperature=column["temperature"],
        top_p=column["top_p"],
        policy_version=column["policy_version"],
        untrainable=column["untrainable"],
        tools=tuple(tools) if isinstance(tools, list) else (),  # scrubbed whole
        tool_calls=msgspec.convert(answer.get("tool_calls") or (), tuple[JsonObject, ...]),
        reasoning=msgspec.convert(answer.get("reasoning"), str | None),
        **ids,
    )
