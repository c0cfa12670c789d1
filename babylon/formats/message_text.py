"""Text out of messages of many shapes. What is not text is refused: images have no place here, and
a tool call is written by a chat template of which the trace says nothing."""

from typing import Any

from babylon.formats.documents import ImportFileError

ROLES = ("system", "developer", "user", "assistant", "tool")


def role_of(place: str, message: Any) -> str:
    """The message's role; OpenAI's ``developer`` is the old ``system``.

    Raises:
        ImportFileError: it has none that is known.
    """
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise ImportFileError(f"{place}: role {role!r} is none of {', '.join(ROLES)}")
    return "system" if role == "developer" else str(role)


def message_text(place: str, message: dict[str, Any]) -> str:
    """``content`` as text, parts joined.

    Raises:
        ImportFileError: there is something else in it.
    """
    if message.get("tool_calls") or message.get("function_call"):
        refuse_tool_call(place)
    return parts_text(place, message.get("content"))


def parts_text(place: str, content: Any) -> str:
    """A string, or a list of ``{"type": "text", "text" | "content": ...}`` parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ImportFileError(f"{place}: content {content!r:.80} is not text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("tool_call", "tool_use", "function_call"):
            refuse_tool_call(place)
        text = part.get("text", part.get("content")) if kind == "text" else None
        if not isinstance(text, str):
            raise ImportFileError(f"{place}: a part of type {kind!r} is not text")
        texts.append(text)
    return "".join(texts)


def refuse_tool_call(place: str) -> None:
    """Raises:
    ImportFileError: always.
    """
    raise ImportFileError(
        f"{place}: a tool call, whose tokens nobody can tell from its fields: import ATIF with"
        " token ids, or leave such messages out"
    )
