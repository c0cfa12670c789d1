"""The format of a file, and its reader."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from babylon.formats.atif_read import read_atif
from babylon.formats.chat_lines import read_chats
from babylon.formats.documents import Document, ImportFileError, read_documents
from babylon.formats.format_names import Format
from babylon.formats.spans import read_span_traces
from babylon.formats.trace import Trace

DEFAULT_AGENT = "imported"


def guess_format(path: Path) -> Format | None:
    """Guess a file's format from the keys of its first object.

    ``None`` stands for spans; their attributes give the dialect.

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
    """Yield the traces of one file of any format except the game's.

    Raises:
        ImportFileError: a line cannot be read. The message names it.
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
            raise ImportFileError(f"{path}: a file of the game's rows holds no traces")
