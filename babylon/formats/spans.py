"""Spans as trajectories: one for each conversation, or for each trace without a conversation id.

Two dialects record the calls of a program, only if the program asks for content:

- ``otel``: OpenTelemetry's GenAI semantic conventions
  (https://github.com/open-telemetry/semantic-conventions-genai). Messages stand in
  ``gen_ai.input.messages`` and ``gen_ai.output.messages``, structured or as a JSON string; up to
  1.36 in an event a message (``gen_ai.user.message``, ``gen_ai.choice``); and in older
  OpenLLMetry (https://github.com/traceloop/openllmetry) in ``gen_ai.prompt.0.content``.
- ``openinference`` (https://arize-ai.github.io/openinference/spec/; Arize Phoenix and others).
  Lists of objects are flattened into keys such as ``llm.input_messages.0.message.role``.

The agent's name comes from the call's span, else from the nearest enclosing span that names one,
else from the service.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from babylon.core.llm_calls import JsonObject, LlmCall, Message
from babylon.formats.captured import CapturedCall, captured_traces, llm_call
from babylon.formats.foreign_messages import are_parts, decoded, is_message, messages_of, one_reply
from babylon.formats.otlp import Span, all_spans
from babylon.formats.trace import Document, ImportFileError, LeaveOut, Trace, refuse

Dialect = Literal["otel", "openinference"]
SpansById = Mapping[tuple[str, str], Span]  # by trace and span
_INPUT, _OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"
_CHOICE = "gen_ai.choice"
_UNNAMED = "unknown_service"  # the SDK's name of a program that has none
_EVENT_ROLES = {
    f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")
} | {_CHOICE: "assistant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRun:
    """One execution of a tool. ``error`` is None if it succeeded."""

    name: str
    arguments: JsonObject
    result: object
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanReader:
    """One dialect. ``messages`` of a span: prompt and replies, each empty if it was not recorded.

    The attribute ``kind`` is ``tool_kind`` if a tool was executed; ``tool`` has its name, arguments
    and result.
    """

    is_call: Callable[[Span], bool]
    kind: str
    tool_kind: str
    agent_kinds: tuple[str, ...]
    tool: tuple[str, str, str]
    conversation: str
    agent: tuple[str, str]
    messages: Callable[[Span], tuple[list[Message], list[Message]]]
    sampling: Callable[[Span], JsonObject]
    output: str
    remedy: str

    def is_tool(self, span: Span) -> bool:
        """Return True for the execution of a tool."""
        return span.attributes.get(self.kind) == self.tool_kind

    def is_agent(self, span: Span) -> bool:
        """Return True for a run of an agent, whose calls and tools are spans of their own."""
        return span.attributes.get(self.kind) in self.agent_kinds

    def read_tool(self, span: Span) -> ToolRun:
        """Return the execution of a tool. Arguments that are no object are its ``input``."""
        name, arguments, result = self.tool
        given = decoded(span.attributes.get(arguments))
        known = given if isinstance(given, dict) else {} if given is None else {"input": given}
        return ToolRun(
            name=span.text(name) or span.name,
            arguments=known,
            result=decoded(span.attributes.get(result)),
            error=span.error,
        )

    def read_call(self, span: Span) -> LlmCall:
        """Return the call of a span.

        Raises:
            ImportFileError: the call failed, its messages were not recorded, or are not text.
        """
        if span.error:
            raise ImportFileError(f"{span.place}: the call failed (status ERROR)")
        prompt, replies = self.messages(span)
        if not prompt or not replies:
            raise ImportFileError(
                f"{span.place}: {self.output} is missing: record content in the traced program"
                f" ({self.remedy})"
            )
        reply = one_reply(span.place, replies)[0]
        return llm_call(span.place, prompt, reply, self.sampling(span), span.start, span.end)


def read_span_traces(
    documents: Iterable[Document],
    agent_id: str,
    dialect: Dialect | None = None,
    leave_out: LeaveOut = refuse,
) -> Iterator[Trace]:
    """Yield the traces of OTLP JSON documents. Calls that failed are left out.

    Raises:
        ImportFileError: no span is a call of the dialect; or a span cannot be read, unless
            ``leave_out`` goes on.
    """
    # Over all documents: exporters split a conversation into several.
    documents = list(documents)
    place = documents[0].place if documents else "an empty file"
    spans = all_spans(documents, leave_out)
    dialect = dialect or _dialect(place, spans)
    reader = _READERS[dialect]
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    # A program may export a span again after an error.
    found = [span for span in by_id.values() if reader.is_call(span)]
    if not found:
        raise ImportFileError(
            f"{place}: none of {len(spans)} spans is a call of the {dialect} dialect"
        )
    calls, agents = [], Agents(by_id)
    for span in found:
        try:
            calls.append(_captured(span, reader, agents))
        except ImportFileError as error:
            leave_out(error)
    yield from captured_traces(calls, agent_id)


def _captured(span: Span, reader: SpanReader, agents: "Agents") -> CapturedCall:
    return CapturedCall(
        place=span.place,
        call_id=span.span_id,
        conversation=span.text(reader.conversation) or span.trace_id,
        agent=agents.agent_of(span, reader),
        start=span.start,
        end=span.end,
        call=reader.read_call(span),
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
    readers = _READERS.values()
    return next((one for one in readers if span.text(one.kind) or one.is_call(span)), None)


class Agents:
    """The agents of spans. Each span is looked at once, however many are inside it."""

    def __init__(self, by_id: SpansById) -> None:
        self._by_id = by_id
        self._known: dict[tuple[str, ...], str | None] = {}  # by the names' keys, trace and span

    def agent_of(self, span: Span, reader: SpanReader) -> str | None:
        """Return the agent that the span or the nearest span around it names, else the service."""
        if name := self._named(span, reader.agent):
            return name
        service = span.resource.get("service.name")
        return str(service) if service and not str(service).startswith(_UNNAMED) else None

    def _named(self, span: Span, keys: tuple[str, str]) -> str | None:
        around: Span | None = span
        inside: list[tuple[str, ...]] = []
        name: str | None = None
        while around is not None and name is None:
            place = (*keys, around.trace_id, around.span_id)
            if place in self._known:
                name = self._known[place]
                break
            self._known[place] = None  # a span may be inside itself
            inside.append(place)
            name = next(filter(None, map(around.text, keys)), None)
            around = self._by_id.get((around.trace_id, around.parent_id))
        self._known |= dict.fromkeys(inside, name)
        return name


def _is_otel_call(span: Span) -> bool:
    operation = span.attributes.get("gen_ai.operation.name")
    older = span.attributes.get("llm.request.type")  # of OpenLLMetry
    return operation in ("chat", "text_completion", "generate_content") or older in (
        "chat",
        "completion",
    )


def _otel_messages(span: Span) -> tuple[list[Message], list[Message]]:
    """Return prompt and replies from the newest form that the span has."""
    if span.attributes.get(_INPUT) or span.attributes.get(_OUTPUT):
        prompt, replies = _structured(span, _INPUT), _structured(span, _OUTPUT)
        instructions = _decoded(span, "gen_ai.system_instructions")
        if instructions:
            prompt = [*messages_of(span.place, {"role": "system", "parts": instructions}), *prompt]
        return prompt, replies
    if any(event.name in _EVENT_ROLES for event in span.events):
        return _from_events(span)
    return _flat(span, "gen_ai.prompt"), _flat(span, "gen_ai.completion")


def _structured(span: Span, key: str) -> list[Message]:
    raw = _decoded(span, key)
    items = raw if isinstance(raw, list) else []
    return [
        message
        for index, item in enumerate(items)
        for message in messages_of(f"{span.place}: {key}[{index}]", item)
    ]


def _from_events(span: Span) -> tuple[list[Message], list[Message]]:
    prompt: list[Message] = []
    replies: list[Message] = []
    for event in span.events:
        if role := _EVENT_ROLES.get(event.name):
            # Some programs write the body as an attribute, others its fields.
            body = decoded(event.attributes.get("gen_ai.event.content")) or event.attributes
            told = body if isinstance(body, dict) else {"content": body}
            if event.name == _CHOICE:
                message = told.get("message")
                inner = decoded(message)
                is_record = isinstance(message, dict) or is_message(inner)
                told = (
                    inner if isinstance(inner, dict) and is_record else {**told, "content": message}
                )
            into = replies if event.name == _CHOICE else prompt
            content = decoded(told.get("content"))
            whole = told | ({"content": content} if are_parts(content) else {})
            into += messages_of(f"{span.place}: {event.name}", {**whole, "role": role})
    return prompt, replies


def _otel_sampling(span: Span) -> JsonObject:
    get = span.attributes.get
    return {
        "model": get("gen_ai.response.model") or get("gen_ai.request.model"),
        "temperature": get("gen_ai.request.temperature"),
        "top_p": get("gen_ai.request.top_p"),
        "max_tokens": get("gen_ai.request.max_tokens"),
        "prompt_tokens": get("gen_ai.usage.input_tokens", get("gen_ai.usage.prompt_tokens")),
        "completion_tokens": get(
            "gen_ai.usage.output_tokens", get("gen_ai.usage.completion_tokens")
        ),
    }


def _decoded(span: Span, key: str) -> object:
    value = span.attributes.get(key)
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ImportFileError(f"{span.place}: {key} is not JSON: {error}") from error


def _flat(span: Span, key: str) -> list[Message]:
    """Return the messages of keys such as ``gen_ai.prompt.0.content``."""
    messages: list[Message] = []
    for index, fields in _unflattened(span, key).items():
        content = decoded(fields.get("content"))
        message = {
            **fields,
            "content": content if are_parts(content) else fields.get("content"),
            "tool_calls": _listed(fields.get("tool_calls")),
        }
        messages += messages_of(f"{span.place}: {key}.{index}", message)
    return messages


def _openinference_messages(span: Span) -> tuple[list[Message], list[Message]]:
    prompt, replies = (
        [
            message
            for index, item in _unflattened(span, key).items()
            for message in _openinference(f"{span.place}: {key}.{index}", item)
        ]
        for key in ("llm.input_messages", "llm.output_messages")
    )
    return prompt, replies


def _openinference(place: str, item: JsonObject) -> list[Message]:
    fields = item.get("message")
    if not isinstance(fields, dict):
        raise ImportFileError(f"{place}: role None: the span has no message.role")
    parts = [one.get("message_content") for one in _listed(fields.get("contents"))]
    calls = [one.get("tool_call") for one in _listed(fields.get("tool_calls"))]
    message = {**fields, "content": fields.get("content") or parts or None, "tool_calls": calls}
    return messages_of(place, message)


def _unflattened(span: Span, prefix: str) -> dict[int, JsonObject]:
    """Return the objects below a prefix by their number; keys with dots are objects in objects."""
    found: dict[int, JsonObject] = {}
    for name, value in span.attributes.items():
        number, _, rest = name.removeprefix(f"{prefix}.").partition(".")
        if not name.startswith(f"{prefix}.") or not _is_place(number) or not rest:
            continue
        owner = found.setdefault(int(number), {})
        *path, last = rest.split(".")
        for part in path:
            inner = owner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ImportFileError(f"{span.place}: {name} stands below a value")
            owner = inner
        owner[last] = value
    return dict(sorted(found.items()))


def _listed(owner: object) -> list[JsonObject]:
    """Return the objects of ``{"0": ..., "1": ...}`` in order."""
    items = owner.items() if isinstance(owner, dict) else ()
    numbered = [(int(key), item) for key, item in items if _is_place(str(key))]
    return [item for _, item in sorted(numbered, key=lambda one: one[0]) if isinstance(item, dict)]


def _is_place(text: str) -> bool:
    """Return True for a number of a list's item. Python reads no number of thousands of digits."""
    return text.isdecimal() and len(text) < 10


def _openinference_sampling(span: Span) -> JsonObject:
    raw = span.text("llm.invocation_parameters") or "{}"
    try:
        parameters = msgspec.json.decode(raw, type=JsonObject)
    except (msgspec.DecodeError, RecursionError) as error:
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
        is_call=_is_otel_call,
        kind="gen_ai.operation.name",
        tool_kind="execute_tool",
        agent_kinds=("invoke_agent", "create_agent", "invoke_workflow"),
        tool=("gen_ai.tool.name", "gen_ai.tool.call.arguments", "gen_ai.tool.call.result"),
        conversation="gen_ai.conversation.id",
        agent=("gen_ai.agent.id", "gen_ai.agent.name"),
        messages=_otel_messages,
        sampling=_otel_sampling,
        output=_OUTPUT,
        remedy="OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=span_only",
    ),
    "openinference": SpanReader(
        is_call=lambda span: span.attributes.get("openinference.span.kind") == "LLM",
        kind="openinference.span.kind",
        tool_kind="TOOL",
        agent_kinds=("AGENT", "CHAIN"),
        tool=("tool.name", "input.value", "output.value"),
        conversation="session.id",
        agent=("agent.name", "user.id"),
        messages=_openinference_messages,
        sampling=_openinference_sampling,
        output="llm.output_messages",
        remedy="OPENINFERENCE_HIDE_INPUTS and OPENINFERENCE_HIDE_OUTPUTS unset",
    ),
}
