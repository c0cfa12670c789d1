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


class Conversation:
    """The messages of a chat, made part by part.

    ``one_turn``: what the assistant says is one turn, so its texts follow each other in a message.

    Parts are joined once, at the end of their message: a request may have a hundred thousand.
    """

    def __init__(self, *, one_turn: bool = False) -> None:
        self._one_turn = one_turn
        self._messages: list[JsonObject] = []
        self._role = ""  # of the newest message, if parts may follow
        self._parts: list[str | list[JsonObject]] = []  # of its content

    def messages(self) -> list[JsonObject]:
        """Return the messages so far. No part is added to them any more."""
        self._close()
        return self._messages

    def add(self, message: JsonObject) -> None:
        """Add a whole message."""
        self._close()
        self._messages.append(message)

    def add_system(self, content: str | list[JsonObject]) -> None:
        """Add instructions. Those that follow each other are one message: templates take one."""
        if self._role != "system":
            self._begin("system")
        self._parts.append(content)

    def add_assistant(
        self,
        *,
        thought: str | None = None,
        text: str | None = None,
        call: JsonObject | None = None,
    ) -> None:
        """Add a part of an assistant's turn.

        A turn in several parts is one chat message, so that the chat template writes it as it was
        sampled. A new message begins with a thought, or with a text after the text of another turn.
        """
        spoke = any(self._parts[-1:]) and "tool_calls" not in self._messages[-1]
        other = text and spoke and not self._one_turn
        if self._role != "assistant" or thought is not None or other:
            self._begin("assistant")
        if thought is not None:
            # vLLM reads "reasoning", chat templates read "reasoning_content".
            self._messages[-1] |= {"reasoning": thought, "reasoning_content": thought}
        if text or (text is not None and not self._parts):
            self._parts.append(text)
        if call is not None:
            self._messages[-1].setdefault("tool_calls", []).append({"type": "function", **call})

    def _begin(self, role: str) -> None:
        self.add({"role": role, "content": None})
        self._role = role

    def _close(self) -> None:
        if self._role == "system":
            self._messages[-1]["content"] = _instructions(self._parts)
        elif self._parts:
            texts = [one for one in self._parts if isinstance(one, str)]
            self._messages[-1]["content"] = "".join(texts)
        elif self._role and "tool_calls" not in self._messages[-1]:
            self._messages[-1]["content"] = ""  # a thought that was cut: templates need a text
        self._role, self._parts = "", []


def _instructions(contents: list[str | list[JsonObject]]) -> str | list[JsonObject]:
    """Return instructions as one content: a text as long as all are texts, then parts."""
    first: list[str] = []
    for content in contents:
        if not isinstance(content, str):
            break
        first.append(content)
    rest, joined = contents[len(first) :], "\n\n".join(first)
    if not rest:
        return joined
    return [part for one in ([joined, *rest] if first else rest) for part in _parts(one)]


def _parts(content: str | list[JsonObject]) -> list[JsonObject]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
