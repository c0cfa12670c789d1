"""Spans as trajectories: one for each conversation, or for each trace without a conversation id.

Two dialects record the calls of a program, only if the program asks for content:

- ``otel``: OpenTelemetry's GenAI semantic conventions
  (https://github.com/open-telemetry/semantic-conventions-genai). Messages stand on the span or on
  its event ``gen_ai.client.inference.operation.details``, structured or as a JSON string.
- ``openinference`` (https://arize-ai.github.io/openinference/spec/; Arize Phoenix and others).
  Lists of objects are flattened into keys such as ``llm.input_messages.0.message.role``.

Files are OTLP JSON, OpenTelemetry's file and HTTP encoding
(https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding): 64-bit integers are strings. Ids
are hexadecimal, or base64 in protobuf's own JSON; they are used as names only.

Calls are ordered by their start. The agent's name comes from the call's span, else from the nearest
enclosing span that names one, else from the service.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

import msgspec

from babylon.core.llm_calls import JsonObject, LlmCall, Message
from babylon.formats.trace import (
    Document,
    ImportFileError,
    Trace,
    TraceStep,
    convert,
    parts_text,
    role_of,
)

Dialect = Literal["otel", "openinference"]
_PART = re.compile(r"message\.contents\.(\d+)\.message_content\.(type|text)")
_TOOL_CALL = re.compile(
    r"message\.tool_calls\.(\d+)\.tool_call\.(id|function\.name|function\.arguments)"
)
_UNNAMED = "unknown_service"  # the SDK's name of a program that has none
_FAILED = (2, "STATUS_CODE_ERROR")  # of a span's status, as a number or by its name
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


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


def raw_spans(document: Document) -> Iterator[RawSpan]:
    """Yield every span of one ``TracesData`` document.

    Raises:
        ImportFileError: the document is not OTLP JSON.
    """
    place = document.place
    for i, group in enumerate(_list(place, document.value, "resourceSpans")):
        resource = _attributes(place, _object(group.get("resource")))
        for j, scope in enumerate(_list(place, group, "scopeSpans")):
            for k, raw in enumerate(_list(place, scope, "spans")):
                where = f"{place}: resourceSpans[{i}].scopeSpans[{j}].spans[{k}]"
                yield RawSpan(where, raw, resource)


def read_span(found: RawSpan) -> Span:
    """Return the span.

    Raises:
        ImportFileError: it lacks its ids or times, or an attribute is not OTLP's.
    """
    place, raw, resource = found
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
        error=_error(_object(raw.get("status")), attributes),
    )


def _error(status: JsonObject, attributes: JsonObject) -> str | None:
    if status.get("code") not in _FAILED:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRun:
    """One execution of a tool. ``error`` is None if it succeeded."""

    name: str
    arguments: JsonObject
    result: object
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanReader:
    """The attributes of one dialect. ``kind`` has one of ``calls`` if the span is a model call, and
    ``tool_kind`` if a tool was executed. ``tool`` has its name, arguments and result.
    """

    kind: str
    calls: tuple[str, ...]
    tool_kind: str
    tool: tuple[str, str, str]
    conversation: str
    agent: tuple[str, str]
    output: str
    messages: Callable[[Span, str], list[Message]]
    prompt: Callable[[Span], list[Message]]
    sampling: Callable[[Span], JsonObject]

    def is_call(self, span: Span) -> bool:
        return span.attributes.get(self.kind) in self.calls

    def is_tool(self, span: Span) -> bool:
        return span.attributes.get(self.kind) == self.tool_kind

    def read_tool(self, span: Span) -> ToolRun:
        """Return the execution of a tool. Arguments that are no object are its ``input``."""
        name, arguments, result = self.tool
        given = _json_or_text(span.attributes.get(arguments))
        known = given if isinstance(given, dict) else {} if given is None else {"input": given}
        return ToolRun(
            name=span.text(name) or span.name,
            arguments=known,
            result=_json_or_text(span.attributes.get(result)),
            error=span.error,
        )

    def read_call(self, span: Span) -> LlmCall:
        """Return the call of a span.

        Raises:
            ImportFileError: the messages were not recorded, or are not text.
        """
        output = self.messages(span, self.output)
        if len(output) != 1:
            raise ImportFileError(f"{span.place}: {len(output)} output messages, expected 1")
        told: dict[str, Any] = self.sampling(span) | {"tool_calls": output[0].get("tool_calls")}
        call = LlmCall.of_messages(
            self.prompt(span),
            response=output[0]["content"] or "",
            latency_ms=round((span.end - span.start).total_seconds() * 1000),
            **{name: value for name, value in told.items() if value is not None},
        )
        return convert(span.place, msgspec.to_builtins(call), LlmCall)  # checks the types


def read_span_traces(
    documents: Iterable[Document], agent_id: str, dialect: Dialect | None = None
) -> Iterator[Trace]:
    """Yield the traces of OTLP JSON documents.

    Raises:
        ImportFileError: no span is a call of the dialect, or a span cannot be read.
    """
    documents = list(documents)
    place = documents[0].place if documents else "an empty file"
    spans = [read_span(raw) for document in documents for raw in raw_spans(document)]
    dialect = dialect or _dialect(place, spans)
    reader = _READERS[dialect]
    # Over all documents: exporters split a conversation into several.
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    groups: dict[str, list[Span]] = {}
    for span in spans:
        if reader.is_call(span):
            groups.setdefault(span.text(reader.conversation) or span.trace_id, []).append(span)
    if not groups:
        raise ImportFileError(
            f"{place}: none of {len(spans)} spans is a call of the {dialect} dialect"
        )
    for name, calls in groups.items():
        calls.sort(key=lambda span: (span.start, span.span_id))
        yield Trace(
            trajectory_id=name,
            agent_id=agent_of(calls[0], by_id, reader) or agent_id,
            steps=tuple(TraceStep(calls=(reader.read_call(c),), at=c.start) for c in calls),
            start=calls[0].start,
            end=max(call.end for call in calls),
            place=calls[0].place,
        )


def _dialect(place: str, spans: list[Span]) -> Dialect:
    """Return the only dialect that has calls. With calls of both, each would count twice."""
    found = [name for name, reader in _READERS.items() if any(map(reader.is_call, spans))]
    if len(found) == 1:
        return found[0]
    raise ImportFileError(
        f"{place}: {len(spans)} spans hold calls of {' and '.join(found) or 'no known dialect'}:"
        " pass --format otel or --format openinference"
    )


def reader_of(span: Span) -> SpanReader | None:
    """Return the reader of the span's dialect, None if it tells of no model, agent or tool."""
    return next((reader for reader in _READERS.values() if span.text(reader.kind)), None)


def agent_of(span: Span, by_id: Mapping[tuple[str, str], Span], reader: SpanReader) -> str | None:
    """Return the agent that the span or the nearest span around it names, else the service."""
    around: Span | None = span
    seen: set[str] = set()
    while around is not None and around.span_id not in seen:
        if name := next(filter(None, map(around.text, reader.agent)), None):
            return name
        seen.add(around.span_id)
        around = by_id.get((around.trace_id, around.parent_id))
    service = span.resource.get("service.name")
    return str(service) if service and not str(service).startswith(_UNNAMED) else None


def _otel_prompt(span: Span) -> list[Message]:
    prompt = _otel_messages(span, "gen_ai.input.messages")
    if instructions := _decoded(span, "gen_ai.system_instructions"):
        text = parts_text(span.place, instructions)
        prompt.insert(0, {"role": "system", "content": text})
    return prompt


def _otel_sampling(span: Span) -> JsonObject:
    get = span.attributes.get
    return {
        "model": get("gen_ai.response.model") or get("gen_ai.request.model"),
        "temperature": get("gen_ai.request.temperature"),
        "top_p": get("gen_ai.request.top_p"),
        "max_tokens": get("gen_ai.request.max_tokens"),
        "prompt_tokens": get("gen_ai.usage.input_tokens"),
        "completion_tokens": get("gen_ai.usage.output_tokens"),
    }


def _otel_messages(span: Span, key: str) -> list[Message]:
    raw = _decoded(span, key)
    if not isinstance(raw, list) or not raw:
        raise ImportFileError(
            f"{span.place}: {key} is missing: record content in the traced program"
            " (OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=span_only)"
        )
    messages: list[Message] = []
    for index, item in enumerate(raw):
        place = f"{span.place}: {key}[{index}]"
        messages += _of_parts(place, role_of(place, item), item.get("parts"))
    return messages


def _of_parts(place: str, role: str, parts: object) -> Iterator[Message]:
    """Yield OpenAI's messages. Each tool's answer is one; the other parts are one together."""
    if not isinstance(parts, list):
        yield {"role": role, "content": parts_text(place, parts)}
        return
    others: list[object] = []
    calls: list[JsonObject] = []
    answered = False
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_call":
            calls.append(_tool_call(place, part.get("id"), part.get("name"), part.get("arguments")))
        elif kind == "tool_call_response":
            said = part.get("response", part.get("result"))
            answered = True
            yield {"role": "tool", "tool_call_id": part.get("id"), "content": _as_text(said)}
        elif kind != "reasoning":  # no part of the prompt of a later call
            others.append(part)
    if calls or others or not answered:
        text = parts_text(place, others)
        more = {"tool_calls": calls} if calls else {}
        yield {"role": role, "content": text or None if calls else text, **more}


def _tool_call(place: str, call_id: object, name: object, arguments: object) -> JsonObject:
    if not isinstance(name, str):
        raise ImportFileError(f"{place}: a tool call has the name {name!r:.80}, which is no text")
    function = {"name": name, "arguments": _as_text({} if arguments is None else arguments)}
    return {"id": call_id, "type": "function", "function": function}


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _json_or_text(value: object) -> object:
    """Return what a string holds as JSON, else the value itself."""
    if isinstance(value, str):
        with suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(value)
    return value


def _decoded(span: Span, key: str) -> object:
    value = span.attributes.get(key)
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise ImportFileError(f"{span.place}: {key} is not JSON: {error}") from error


def _openinference_messages(span: Span, key: str) -> list[Message]:
    fields: dict[int, JsonObject] = {}
    for name, value in span.attributes.items():
        if name.startswith(f"{key}."):
            index, _, rest = name.removeprefix(f"{key}.").partition(".")
            if index.isdecimal():
                fields.setdefault(int(index), {})[rest] = value
    if not fields:
        raise ImportFileError(
            f"{span.place}: {key} is missing: record content in the traced program"
            " (OPENINFERENCE_HIDE_INPUTS and OPENINFERENCE_HIDE_OUTPUTS unset)"
        )
    return [_message(f"{span.place}: {key}.{index}", fields[index]) for index in sorted(fields)]


def _message(place: str, fields: JsonObject) -> Message:
    parts: dict[int, JsonObject] = {}
    calls: dict[int, JsonObject] = {}
    for name, value in fields.items():
        if found := _PART.fullmatch(name):
            parts.setdefault(int(found[1]), {})[found[2]] = value
        elif found := _TOOL_CALL.fullmatch(name):
            calls.setdefault(int(found[1]), {})[found[2]] = value
    content = fields.get("message.content") or [parts[index] for index in sorted(parts)]
    text = parts_text(place, content)
    message: Message = {"role": role_of(place, {"role": fields.get("message.role")})}
    if answered := fields.get("message.tool_call_id"):
        return {**message, "tool_call_id": answered, "content": text}
    if not calls:
        return {**message, "content": text}
    listed = [
        _tool_call(place, one.get("id"), one.get("function.name"), one.get("function.arguments"))
        for _, one in sorted(calls.items())
    ]
    return {**message, "content": text or None, "tool_calls": listed}


def _openinference_sampling(span: Span) -> JsonObject:
    raw = span.text("llm.invocation_parameters") or "{}"
    try:
        parameters = msgspec.json.decode(raw, type=JsonObject)
    except msgspec.DecodeError as error:
        raise ImportFileError(
            f"{span.place}: llm.invocation_parameters is not a JSON object: {error}"
        ) from error
    return {
        "model": span.attributes.get("llm.model_name"),
        "temperature": parameters.get("temperature"),
        "top_p": parameters.get("top_p"),
        "max_tokens": parameters.get("max_completion_tokens") or parameters.get("max_tokens"),
        "prompt_tokens": span.attributes.get("llm.token_count.prompt"),
        "completion_tokens": span.attributes.get("llm.token_count.completion"),
    }


_READERS: dict[Dialect, SpanReader] = {
    "otel": SpanReader(
        kind="gen_ai.operation.name",
        calls=("chat", "text_completion", "generate_content"),
        tool_kind="execute_tool",
        tool=("gen_ai.tool.name", "gen_ai.tool.call.arguments", "gen_ai.tool.call.result"),
        conversation="gen_ai.conversation.id",
        agent=("gen_ai.agent.id", "gen_ai.agent.name"),
        output="gen_ai.output.messages",
        messages=_otel_messages,
        prompt=_otel_prompt,
        sampling=_otel_sampling,
    ),
    "openinference": SpanReader(
        kind="openinference.span.kind",
        calls=("LLM",),
        tool_kind="TOOL",
        tool=("tool.name", "input.value", "output.value"),
        conversation="session.id",
        agent=("agent.name", "user.id"),
        output="llm.output_messages",
        messages=_openinference_messages,
        prompt=lambda span: _openinference_messages(span, "llm.input_messages"),
        sampling=_openinference_sampling,
    ),
}
