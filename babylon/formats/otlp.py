"""Reader of OTLP JSON, OpenTelemetry's file and HTTP encoding: spans with plain attributes.

https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding. 64-bit integers are strings. Ids
are hexadecimal, or base64 in protobuf's own JSON; they are used as names only.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from babylon.formats.documents import Document, ImportFileError, JsonObject
from babylon.formats.trace import TraceCall, convert

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One operation.

    ``resource`` holds the attributes of the program. ``attributes`` includes those of the span's
    events, unless the span has an attribute of the same name.
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

    def text(self, key: str) -> str | None:
        """Return an attribute as text, None if it is missing or empty."""
        value = self.attributes.get(key)
        return str(value) if value else None


def read_spans(document: Document) -> Iterator[Span]:
    """Yield every span of one ``TracesData`` document.

    Raises:
        ImportFileError: the document is not OTLP JSON, or a span lacks its ids or times.
    """
    place = document.place
    for i, group in enumerate(_list(place, document.value, "resourceSpans")):
        resource = _attributes(place, _object(group.get("resource")))
        for j, scope in enumerate(_list(place, group, "scopeSpans")):
            for k, raw in enumerate(_list(place, scope, "spans")):
                where = f"{place}: resourceSpans[{i}].scopeSpans[{j}].spans[{k}]"
                yield _span(where, raw, resource)


def _span(place: str, raw: JsonObject, resource: JsonObject) -> Span:
    if not raw.get("traceId") or not raw.get("spanId"):
        raise ImportFileError(f"{place}: traceId or spanId is missing")
    attributes: JsonObject = {}
    for event in _list(place, raw, "events"):
        attributes.update(_attributes(place, event))
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
    )


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
            return [_value(place, item) for item in _list(place, _object(inner), "values")]
        case "kvlistValue":
            pairs = _list(place, _object(inner), "values")
            return {str(pair.get("key")): _value(place, pair.get("value")) for pair in pairs}
    raise ImportFileError(f"{place}: attribute value of kind {kind!r} is unknown")


def _object(value: object) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _list(place: str, owner: JsonObject, key: str) -> list[JsonObject]:
    items = owner.get(key, [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ImportFileError(f"{place}: {key} is not a list of objects")
    return items


def span_call(span: Span, **fields: object) -> TraceCall:
    """Return a call with the span's duration and the fields that are not None.

    Raises:
        ImportFileError: a field has the wrong type.
    """
    took = round((span.end - span.start).total_seconds() * 1000)
    known = {name: value for name, value in fields.items() if value is not None}
    return convert(span.place, {**known, "latency_ms": took}, TraceCall)
