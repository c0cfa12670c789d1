"""Validation of a request in another dialect, and what its fields have in common."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec
from msgspec import Struct

from babylon.serving.openai_wire import JsonObject, RequestError

T = TypeVar("T")


def converted(value: object, kind: type[T], what: str) -> T:
    """Return a part of a request as ``kind``.

    Raises:
        RequestError: 400, it is something else; the message names the field.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RequestError(400, f"bad {what}: {error}") from error


def refuse(fields: Mapping[str, object], remedies: Mapping[str, str]) -> None:
    """Refuse a request that sets a field which has no equivalent.

    Raises:
        RequestError: 400, with the field's remedy.
    """
    for name, remedy in remedies.items():
        if fields.get(name):
            raise RequestError(400, f"{name} is not supported: {remedy}")


def passed_on(fields: JsonObject, translated: type[Struct], dropped: Iterable[str]) -> JsonObject:
    """Return the fields of the chat request that are the same in this dialect.

    Args:
        translated: names the fields that have another form in a chat.
        dropped: fields without effect on the tokens here.
    """
    left_out = {*translated.__struct_fields__, *dropped}
    chat = {name: value for name, value in fields.items() if name not in left_out}
    if fields.get("stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat


def kind_of(part: object, allowed: Iterable[str], what: str, default: str | None = None) -> str:
    """Return the ``type`` of a part.

    Raises:
        RequestError: 400, the part is not an object, or its type is none of ``allowed``.
    """
    kind = part.get("type", default) if isinstance(part, dict) else None
    if kind not in (known := tuple(allowed)):
        raise RequestError(400, f"{what} of type {kind!r:.80}: use {', '.join(known)}")
    return str(kind)


def content_of(parts: list[JsonObject]) -> str | list[JsonObject]:
    """Return a message's content: a single text as a string, as most templates expect it."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def add_system(messages: list[JsonObject], content: str | list[JsonObject]) -> None:
    """Add instructions. Those that follow each other are one message: templates take one."""
    last = messages[-1] if messages else {}
    if last.get("role") != "system":
        messages.append({"role": "system", "content": content})
    elif isinstance(content, str) and isinstance(last["content"], str):
        last["content"] += f"\n\n{content}"
    else:
        last["content"] = [*_parts(last["content"]), *_parts(content)]


def _parts(content: str | list[JsonObject]) -> list[JsonObject]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def add_assistant(
    messages: list[JsonObject],
    *,
    thought: str | None = None,
    text: str | None = None,
    call: JsonObject | None = None,
) -> None:
    """Add a part of an assistant's turn.

    A turn in several parts is one chat message, so that the chat template writes it as it was
    sampled. A new message begins with a thought, or with text after text.
    """
    last = messages[-1] if messages else {}
    if (
        last.get("role") != "assistant"
        or thought is not None
        or (text and last["content"] and "tool_calls" not in last)
    ):
        messages.append(last := {"role": "assistant", "content": None})
    if thought is not None:
        # vLLM reads "reasoning", chat templates read "reasoning_content".
        last |= {"reasoning": thought, "reasoning_content": thought}
    if text is not None:
        last["content"] = (last["content"] or "") + text
    if call is not None:
        last.setdefault("tool_calls", []).append({"type": "function", **call})
