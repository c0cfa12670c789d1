"""Reader of JSON files: one object a line, or one object or list of objects over many lines."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

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
