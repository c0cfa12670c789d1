"""A call as the attributes of a span, after OpenTelemetry's GenAI semantic conventions.

https://github.com/open-telemetry/semantic-conventions-genai/blob/main/docs/gen-ai/gen-ai-spans.md

``babylon.*`` attributes are ours. What agents and models say is left out unless it is asked for. It
is then the call as it may be recorded: the rules of ``babylon calls record`` hold here too.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from babylon.core.llm_calls import content_text, object_of
from babylon.quality.decode import is_deep
from babylon.serving.gateway.exchange import CHAT, Exchange
from babylon.serving.gateway.play.assemble import sent_messages
from babylon.serving.openai_wire import JsonObject
from babylon.store.calls import RecordedCall

Value = str | bool | int | float | Sequence[str]
Attributes = dict[str, Value]
MAX_CONTENT_BYTES = 2**16  # of one attribute: a collector takes some megabytes in a request
_SAMPLING = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")


def operation(exchange: Exchange) -> str:
    """Return ``gen_ai.operation.name``. Responses and messages are chats too."""
    return "chat" if exchange.dialect is CHAT else "text_completion"


def attributes(exchange: Exchange, outcome: str, route: str) -> Attributes:
    """Return the attributes of a call without its content.

    Args:
        outcome: an HTTP status, or "left".
        route: the endpoint's path.
    """
    asked, assigned, caller = exchange.request, exchange.assigned, exchange.identity
    found: dict[str, Value | None] = {
        "gen_ai.operation.name": operation(exchange),
        "gen_ai.provider.name": "babylon",
        "gen_ai.request.model": asked.model,
        "gen_ai.request.stream": asked.stream or None,
        "gen_ai.request.max_tokens": asked.limit,
        "gen_ai.request.seed": asked.seed,
        "gen_ai.request.choice.count": asked.choices if asked.choices > 1 else None,
        "gen_ai.response.id": exchange.call_id,
        "gen_ai.response.model": assigned.target.name,
        "gen_ai.conversation.id": caller.trajectory_id,
        "gen_ai.agent.id": caller.agent_id,
        "http.route": route,
        "babylon.policy.version": assigned.target.policy_version,
        "babylon.arm": assigned.arm,
        "babylon.route.version": assigned.route.route_version,
        "babylon.step": caller.step,
        "babylon.key": exchange.key_id,
        "error.type": None if outcome == "200" else outcome,
    }
    for name in _SAMPLING:
        value = exchange.fields.get(name)
        # The engine refuses anything else. One span that cannot be encoded would cost its batch.
        if isinstance(value, int | float) and abs(value) < 2**63:
            found[f"gen_ai.request.{name}"] = float(value)
    if exchange.first_at:  # the engine answered
        found |= {
            "gen_ai.usage.input_tokens": exchange.used[0],
            "gen_ai.usage.output_tokens": exchange.used[1],
            "gen_ai.response.finish_reasons": [exchange.finish_reason or "unknown"],
        }
        if asked.stream:
            first = (exchange.first_at - exchange.started_at).total_seconds()
            found["gen_ai.response.time_to_first_chunk"] = first
    return {name: value for name, value in found.items() if value is not None}


def content(call: RecordedCall) -> Attributes:
    """Return the messages, the answer and the tools of a call as it may be recorded."""
    said = msgspec.json.decode(call.answer) if call.answer else {}
    answer = {"role": "assistant", "content": call.response, **said}
    tools = msgspec.json.decode(call.parameters).get("tools")
    listed = tools if isinstance(tools, list) else ()  # a rule may redact them as a whole
    output = {**_message(answer), "finish_reason": call.finish_reason}
    return {
        "gen_ai.input.messages": _newest(map(_message, sent_messages(call.messages))),
        "gen_ai.output.messages": _newest([output]),
        **({"gen_ai.tool.definitions": _newest(map(_tool, listed))} if listed else {}),
    }


def _newest(items: Iterable[object]) -> str:
    """Return a JSON list of the last items that fit into an attribute."""
    kept: list[bytes] = []
    room = MAX_CONTENT_BYTES
    for item in reversed([msgspec.json.encode(item) for item in items]):
        room -= len(item) + 1
        if room < 0:
            break
        kept.append(item)
    return f"[{b','.join(reversed(kept)).decode()}]"


def _message(message: JsonObject) -> JsonObject:
    """Return OpenAI's message as the conventions write it: a role, and parts."""
    role, text = message.get("role"), content_text(message)
    if role == "tool":
        answered = message.get("tool_call_id")
        return {
            "role": "tool",
            "parts": [{"type": "tool_call_response", "id": answered, "response": text}],
        }
    parts: list[JsonObject] = []
    if thought := message.get("reasoning") or message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": thought})
    if text:
        parts.append({"type": "text", "content": text})
    calls = message.get("tool_calls")
    parts += [_tool_call(object_of(call)) for call in (calls if isinstance(calls, list) else ())]
    return {"role": role, "parts": parts}


def _tool_call(call: JsonObject) -> JsonObject:
    function = object_of(call.get("function"))
    arguments = function.get("arguments")
    # The model wrote no JSON, or JSON so deep that it cannot be encoded again: its text is kept.
    with suppress(msgspec.DecodeError, RecursionError):
        if not is_deep(text := str(arguments)):
            arguments = msgspec.json.decode(text)
    name = function.get("name")
    return {"type": "tool_call", "id": call.get("id"), "name": name, "arguments": arguments}


def _tool(sent: object) -> JsonObject:
    """Return a tool with the fields of its function beside its type."""
    tool = object_of(sent)  # an engine may have refused what was sent as one
    return {"type": tool.get("type"), **object_of(tool.get("function"))}
