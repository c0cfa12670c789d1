"""The text of messages of many shapes.

Images are refused. Tool calls are refused as well: the chat template decides how a tool call is
written, and a trace does not name its template.
"""

from collections.abc import Mapping
from typing import NoReturn

from babylon.formats.documents import ImportFileError

ROLES = ("system", "developer", "user", "assistant", "tool")


def role_of(place: str, message: object) -> str:
    """Return the message's role. OpenAI's ``developer`` becomes ``system``.

    Raises:
        ImportFileError: the role is missing or unknown.
    """
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise ImportFileError(f"{place}: role {role!r} is not one of {', '.join(ROLES)}")
    return "system" if role == "developer" else str(role)


def message_text(place: str, message: Mapping[str, object]) -> str:
    """Return ``content`` as text, with its parts joined.

    Raises:
        ImportFileError: the message holds anything else.
    """
    if message.get("tool_calls") or message.get("function_call"):
        refuse_tool_call(place)
    return parts_text(place, message.get("content"))


def parts_text(place: str, content: object) -> str:
    """Return a string, or the joined ``{"type": "text", "text" | "content": ...}`` parts of a list.

    Raises:
        ImportFileError: a part is not text.
    """
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


def refuse_tool_call(place: str) -> NoReturn:
    """Raise the error for a tool call.

    Raises:
        ImportFileError: always.
    """
    raise ImportFileError(
        f"{place}: a tool call cannot be imported, because its fields do not give its tokens:"
        " import ATIF with token ids, or leave such messages out"
    )
