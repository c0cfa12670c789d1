"""Spans as trajectories: one for each conversation, or for each trace without a conversation id.

Calls are ordered by their start. The agent's name comes from the call's span, else from the nearest
enclosing span that names one, else from the service.
"""

from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Literal

from babylon.formats import genai, openinference
from babylon.formats.documents import Document, ImportFileError
from babylon.formats.otlp import Span, read_spans
from babylon.formats.trace import Trace, TraceStep

Dialect = Literal["otel", "openinference"]
DIALECTS: dict[Dialect, ModuleType] = {"otel": genai, "openinference": openinference}


def read_span_traces(
    documents: Iterable[Document], agent_id: str, dialect: Dialect | None = None
) -> Iterator[Trace]:
    """Yield the traces of OTLP JSON documents.

    Raises:
        ImportFileError: no span is a call of the dialect, or a span cannot be read.
    """
    documents = list(documents)
    place = documents[0].place if documents else "an empty file"
    spans = [span for document in documents for span in read_spans(document)]
    dialect = dialect or _dialect(place, spans)
    reader = DIALECTS[dialect]
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    groups: dict[str, list[Span]] = {}
    for span in spans:
        if reader.is_call(span):
            groups.setdefault(reader.conversation(span) or span.trace_id, []).append(span)
    if not groups:
        raise ImportFileError(
            f"{place}: none of {len(spans)} spans is a call of the {dialect} dialect"
        )
    for name, calls in groups.items():
        calls.sort(key=lambda span: (span.start, span.span_id))
        yield Trace(
            trajectory_id=name,
            agent_id=_agent(calls[0], by_id, reader) or agent_id,
            steps=tuple(TraceStep(calls=(reader.read_call(c),), at=c.start) for c in calls),
            start=calls[0].start,
            end=max(call.end for call in calls),
            place=calls[0].place,
        )


def _dialect(place: str, spans: list[Span]) -> Dialect:
    """Return the dialect of the calls.

    Raises:
        ImportFileError: the spans hold calls of no dialect or of both; then each would count twice.
    """
    found = [name for name, reader in DIALECTS.items() if any(map(reader.is_call, spans))]
    if len(found) == 1:
        return found[0]
    raise ImportFileError(
        f"{place}: {len(spans)} spans hold calls of {' and '.join(found) or 'no known dialect'}:"
        " pass --format otel or --format openinference"
    )


def _agent(span: Span, by_id: dict[tuple[str, str], Span], reader: ModuleType) -> str | None:
    around: Span | None = span
    seen: set[str] = set()
    while around is not None and around.span_id not in seen:
        if name := reader.agent(around):
            return str(name)
        seen.add(around.span_id)
        around = by_id.get((around.trace_id, around.parent_id))
    service = span.resource.get("service.name")
    return str(service) if service else None
