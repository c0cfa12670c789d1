"""Tool calls in text: Hermes' format, which Qwen's chat templates use as well.

A call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``
(https://github.com/NousResearch/Hermes-Function-Calling). OpenAI's messages hold the arguments as
a JSON string, the templates take them as an object.
"""

import secrets
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from babylon.serving.openai_wire import JsonObject, RequestError

_BEGIN, _END = "<tool_call>", "</tool_call>"


class _Call(Struct, frozen=True):
    name: str
    arguments: dict[str, object] = {}


class ToolCallParser:
    """Separates the tool calls of a growing answer from its text.

    Text that may be the beginning of a call is held back. A call that is not valid JSON, or is cut
    off, stays text. White space around calls belongs to neither.
    """

    def __init__(self, *, most: int | None = None) -> None:
        self.found = 0
        self._most = most
        self._held = ""
        self._after_call = False  # nothing but white space came since

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[JsonObject]]:
        """Return the text and the calls, in OpenAI's format, that are complete by now."""
        self._held += text
        if self._after_call:
            self._held = self._held.lstrip()
            self._after_call = not self._held
        plain, calls = "", list[JsonObject]()
        while _BEGIN in self._held:
            before, _, rest = self._held.partition(_BEGIN)
            body, end, after = rest.partition(_END)
            if not end:
                break
            plain += before
            call = _decoded(body)
            if call is None:
                plain += _BEGIN + body + _END
            else:
                plain, after = plain.rstrip(), after.lstrip()
                calls.append(call)
                self._after_call = not after
            self._held = after
        if last:
            plain, self._held = plain + self._held, ""
        elif _BEGIN not in self._held:
            cut = _safe_end(self._held)
            plain, self._held = plain + self._held[:cut], self._held[cut:]
        if self._most is not None:
            calls = calls[: max(0, self._most - self.found)]
        self.found += len(calls)
        return plain, calls


def _decoded(body: str) -> JsonObject | None:
    try:
        call = msgspec.json.decode(body, type=_Call)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    arguments = msgspec.json.encode(call.arguments).decode()
    function = {"name": call.name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _safe_end(text: str) -> int:
    """Return the position from which on the text may begin a call or the space before one."""
    held = next((n for n in range(len(_BEGIN) - 1, 0, -1) if text.endswith(_BEGIN[:n])), 0)
    return len(text[: len(text) - held].rstrip())


def template_message(message: JsonObject) -> JsonObject:
    """Return a message as chat templates take it: text parts joined, arguments as objects.

    Raises:
        RequestError: 400, the role is unknown, the content is not text, or a call is malformed.
    """
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise RequestError(400, f"message role {role!r}: use system, user, assistant or tool")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RequestError(400, f"tool_calls {calls!r:.80}: send a list")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        known = [text for text in texts if isinstance(text, str)]
        content = "".join(known) if len(known) == len(texts) else content
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise RequestError(400, f"{role} message content {content!r:.80}: this engine accepts text")
    plain: JsonObject = {"role": "system" if role == "developer" else role, "content": content}
    if calls:
        plain["tool_calls"] = [_template_call(call) for call in calls]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            plain[name] = message[name]
    return plain


def _template_call(call: object) -> JsonObject:
    function = call.get("function") if isinstance(call, Mapping) else None
    try:
        if not isinstance(function, Mapping):
            raise TypeError("it has no function")
        arguments = msgspec.json.decode(function["arguments"] or "{}", type=dict[str, object])
        return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    except (KeyError, TypeError, RecursionError, msgspec.DecodeError) as error:
        raise RequestError(
            400, f"tool call {call!r:.200}: {error}; send a function with a name and JSON arguments"
        ) from error
