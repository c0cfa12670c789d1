"""OTLP JSON, OpenTelemetry's file and HTTP encoding, as spans.

https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding: 64-bit integers are strings. Ids
are hexadecimal, or base64 in protobuf's own JSON; they are used as names only.

Contents of a span stand on the span, in its events, or in log records that name it (conventions up
to 1.36). All three end up in the span.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec

from babylon.core.llm_calls import JsonObject, object_of
from babylon.formats.trace import Document, ImportFileError, LeaveOut, refuse

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ERROR = (2, "STATUS_CODE_ERROR")


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that was told during a span: an event, or a log record with its body."""

    name: str
    attributes: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One operation.

    ``resource`` holds the attributes of the program. ``attributes`` includes those of the span's
    events, unless the span has an attribute of the same name. ``error``: why the operation failed.
    """

    place: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start: datetime
    end: datetime
    attributes: JsonObject
    resource: JsonObject = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    error: str | None = None

    def text(self, key: str) -> str | None:
        """Return an attribute as text, None if it is missing or empty."""
        value = self.attributes.get(key)
        return str(value) if value else None


class RawSpan(NamedTuple):
    """A span as OTLP JSON, and the attributes of its program."""

    place: str
    value: JsonObject
    resource: JsonObject


def is_otlp(value: JsonObject) -> bool:
    """Return True for a document of spans or log records."""
    return "resourceSpans" in value or "resourceLogs" in value


def all_spans(documents: Iterable[Document], leave_out: LeaveOut = refuse) -> list[Span]:
    """Return the spans of all documents, each with what the log records tell of it.

    Raises:
        ImportFileError: a document or an attribute is not OTLP JSON, or a span lacks its ids or
            times, unless ``leave_out`` goes on.
    """
    spans: list[Span] = []
    logs: defaultdict[tuple[str, str], list[SpanEvent]] = defaultdict(list)
    seen = set[bytes]()
    for document in documents:
        try:
            for key, event in _logged(document, seen, leave_out):
                logs[key].append(event)
            spans += read_spans(document, leave_out)
        except ImportFileError as error:
            leave_out(error)
    return [
        _told(span, found) if (found := logs.get((span.trace_id, span.span_id))) else span
        for span in spans
    ]


def _told(span: Span, logged: list[SpanEvent]) -> Span:
    attributes: JsonObject = {}
    for event in logged:
        attributes.update(event.attributes)
    return replace(
        span, events=(*span.events, *logged), attributes={**attributes, **span.attributes}
    )


def read_spans(document: Document, leave_out: LeaveOut = refuse) -> Iterator[Span]:
    """Yield every span of one ``TracesData`` document.

    Raises:
        ImportFileError: the document is not OTLP JSON; or a span lacks its ids or times, unless
            ``leave_out`` goes on.
    """
    for raw in raw_spans(document):
        try:
            yield read_span(raw)
        except ImportFileError as error:
            leave_out(error)


def raw_spans(document: Document) -> Iterator[RawSpan]:
    """Yield every span of one ``TracesData`` document.

    Raises:
        ImportFileError: the document is not OTLP JSON.
    """
    for place, raw, resource in _records(document, "Spans", "spans"):
        yield RawSpan(place, raw, resource)


def _records(
    document: Document, kind: str, leaf: str
) -> Iterator[tuple[str, JsonObject, JsonObject]]:
    """Yield (place, record, attributes of the program) of every record of a kind."""
    place = document.place
    for i, group in enumerate(_list(place, document.value, f"resource{kind}")):
        resource = _attributes(place, object_of(group.get("resource")))
        for j, scope in enumerate(_list(place, group, f"scope{kind}")):
            for k, raw in enumerate(_list(place, scope, leaf)):
                yield f"{place}: resource{kind}[{i}].scope{kind}[{j}].{leaf}[{k}]", raw, resource


def _logged(
    document: Document, seen: set[bytes], leave_out: LeaveOut
) -> Iterator[tuple[tuple[str, str], SpanEvent]]:
    """Yield the log records that are not in ``seen``: exporters send again what got no answer."""
    for place, raw, _ in _records(document, "Logs", "logRecords"):
        record = msgspec.json.encode(raw, order="sorted")  # with its time: no other is equal
        if record in seen:
            continue
        seen.add(record)
        try:
            attributes, body = _attributes(place, raw), _value(place, raw.get("body"))
        except ImportFileError as error:
            leave_out(error)
            continue
        name = raw.get("eventName") or attributes.get("event.name")
        told = {**attributes, **(body if isinstance(body, dict) else {})}
        yield (str(raw.get("traceId")), str(raw.get("spanId"))), SpanEvent(str(name), told)


def read_span(found: RawSpan) -> Span:
    """Return the span.

    Raises:
        ImportFileError: it lacks its ids or times, or an attribute is not OTLP's.
    """
    place, raw, resource = found
    if not raw.get("traceId") or not raw.get("spanId"):
        raise ImportFileError(f"{place}: traceId or spanId is missing")
    events = tuple(
        SpanEvent(str(event.get("name")), _attributes(place, event))
        for event in _list(place, raw, "events")
    )
    attributes: JsonObject = {}
    for event in events:
        attributes.update(event.attributes)
    attributes.update(_attributes(place, raw))
    return Span(
        place=place,
        trace_id=str(raw["traceId"]),
        span_id=str(raw["spanId"]),
        parent_id=str(raw.get("parentSpanId") or ""),
        name=str(raw.get("name", "")),
        start=_moment(place, raw, "startTimeUnixNano"),
        end=_moment(place, raw, "endTimeUnixNano"),
        attributes=attributes,
        resource=resource,
        events=events,
        error=_error(object_of(raw.get("status")), attributes),
    )


def _error(status: JsonObject, attributes: JsonObject) -> str | None:
    if status.get("code") not in _ERROR:
        return None
    return str(status.get("message") or attributes.get("error.type") or "failed")


def _moment(place: str, raw: JsonObject, key: str) -> datetime:
    nanoseconds = _integer(f"{place}: {key}", raw.get(key))
    if not 0 <= nanoseconds < 2**63:
        raise ImportFileError(
            f"{place}: {key} is {nanoseconds}, not a time in nanoseconds since 1970"
        )
    return _EPOCH + timedelta(microseconds=nanoseconds // 1000)


def _integer(place: str, value: object) -> int:
    """Return a 64-bit integer. OTLP writes it as a string; some programs write a number."""
    if isinstance(value, str | int | float):
        with suppress(ValueError, OverflowError):
            return int(value)
    raise ImportFileError(f"{place}: {value!r:.80} is not an integer")


def _attributes(place: str, owner: JsonObject) -> JsonObject:
    return {
        str(pair.get("key")): _value(place, pair.get("value"))
        for pair in _list(place, owner, "attributes")
    }


def _value(place: str, value: object) -> object:
    if not isinstance(value, dict) or len(value) != 1:
        if value == {} or value is None:  # protobuf's empty value
            return None
        raise ImportFileError(f"{place}: attribute value {value!r:.80} is not an OTLP value")
    ((kind, inner),) = value.items()
    match kind:
        case "stringValue" | "boolValue" | "doubleValue" | "bytesValue":
            return inner
        case "intValue":
            return _integer(place, inner)
        case "arrayValue":
            return [_value(place, item) for item in _list(place, object_of(inner), "values")]
        case "kvlistValue":
            pairs = _list(place, object_of(inner), "values")
            return {str(pair.get("key")): _value(place, pair.get("value")) for pair in pairs}
    raise ImportFileError(f"{place}: attribute value of kind {kind!r} is unknown")


def _list(place: str, owner: JsonObject, key: str) -> list[JsonObject]:
    items = owner.get(key)
    if items is None:  # protobuf's JSON may write null for an empty list
        return []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ImportFileError(f"{place}: {key} is not a list of objects")
    return items
