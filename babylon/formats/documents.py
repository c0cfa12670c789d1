"""Reader of JSON files: one object a line, or one object or list of objects over many lines."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeAlias

import msgspec

from babylon.core.errors import DatabaseError

JsonObject: TypeAlias = dict[str, object]
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class ImportFileError(DatabaseError):
    """A file that cannot be imported. The import writes nothing."""


@dataclass(frozen=True, slots=True)
class Document:
    """One JSON object. ``place`` is ``file:line``."""

    place: str
    value: JsonObject


def read_documents(path: Path) -> Iterator[Document]:
    """Yield the file's objects in order. Lines are streamed.

    Raises:
        ImportFileError: the file cannot be read, or a line is not a JSON object.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ImportFileError(f"cannot read {path}: {error.strerror}") from error
    with file:
        first = True
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            place = f"{path}:{number}"
            try:
                yield Document(place, msgspec.json.decode(text, type=JsonObject))
            except _MALFORMED as error:
                if not first:
                    raise ImportFileError(f"{place}: not a JSON object: {error}") from error
                yield from _one_document(place, text + file.read())
            first = False


def _one_document(place: str, text: bytes) -> list[Document]:
    try:
        value = msgspec.json.decode(text, type=JsonObject | list[JsonObject])
    except _MALFORMED as error:
        raise ImportFileError(f"{place}: not a JSON object: {error}") from error
    if isinstance(value, dict):
        return [Document(place, value)]
    return [Document(f"{place}[{index}]", item) for index, item in enumerate(value)]


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
