"""How a file tells its format, and who reads it."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from babylon.formats.atif_read import read_atif
from babylon.formats.chat import read_chats
from babylon.formats.documents import Document, ImportFileError, read_documents
from babylon.formats.names import Format
from babylon.formats.spans import read_span_traces
from babylon.formats.trace import Trace

DEFAULT_AGENT = "imported"


def guess_format(path: Path) -> Format | None:
    """By the keys of the file's first object; ``None`` for spans, whose dialect they must tell.

    Raises:
        ImportFileError: the file cannot be read.
    """
    first = next(iter(read_documents(path)), None)
    keys = first.value.keys() if first else set()
    if "resourceSpans" in keys:
        return None
    if "schema_version" in keys and "steps" in keys:
        return Format.ATIF
    if isinstance(first and first.value.get("messages"), list):
        return Format.CHAT
    return Format.GAME


def read_traces(
    path: Path, format: Format | None, agent_id: str = DEFAULT_AGENT
) -> Iterator[Trace]:
    """The traces of one file of any format but the game's.

    Raises:
        ImportFileError: a line cannot be read; the message names it.
    """
    documents: Iterable[Document] = read_documents(path)
    match format:
        case Format.ATIF:
            for document in documents:
                yield from read_atif(document)
        case Format.CHAT:
            yield from read_chats(documents, agent_id)
        case Format.OTEL:
            yield from read_span_traces(documents, agent_id, "otel")
        case Format.OPENINFERENCE:
            yield from read_span_traces(documents, agent_id, "openinference")
        case None:
            yield from read_span_traces(documents, agent_id)
        case Format.GAME:
            raise ImportFileError(f"{path}: the game's rows are no traces")
