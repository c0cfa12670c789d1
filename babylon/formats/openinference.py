"""Reader of spans in the OpenInference dialect (Arize Phoenix and others).

https://arize-ai.github.io/openinference/spec/: lists of objects are flattened into keys such as
``llm.input_messages.0.message.role``. ``message.contents`` holds the parts of one message.
"""

import re

import msgspec

from babylon.core.trajectories import Message
from babylon.formats.documents import (
    ImportFileError,
    JsonObject,
    parts_text,
    refuse_tool_call,
    role_of,
)
from babylon.formats.otlp import Span, span_call
from babylon.formats.trace import TraceCall

KIND = "openinference.span.kind"
_PART = re.compile(r"message\.contents\.(\d+)\.message_content\.(type|text)")


def is_call(span: Span) -> bool:
    """Return True for a model call. Chains, tools and agents have spans as well."""
    return span.attributes.get(KIND) == "LLM"


def read_call(span: Span) -> TraceCall:
    """Return the call of an LLM span.

    Raises:
        ImportFileError: the messages were not recorded, or are not text.
    """
    get = span.attributes.get
    output = _messages(span, "llm.output_messages")
    if len(output) != 1:
        raise ImportFileError(f"{span.place}: {len(output)} output messages, expected 1")
    parameters = _parameters(span)
    limit = parameters.get("max_completion_tokens") or parameters.get("max_tokens")
    return span_call(
        span,
        messages=_messages(span, "llm.input_messages"),
        response=output[0].content,
        model=get("llm.model_name"),
        temperature=parameters.get("temperature"),
        top_p=parameters.get("top_p"),
        max_tokens=limit,
        prompt_tokens=get("llm.token_count.prompt"),
        completion_tokens=get("llm.token_count.completion"),
    )


def conversation(span: Span) -> str | None:
    return span.text("session.id")


def agent(span: Span) -> str | None:
    return span.text("agent.name") or span.text("user.id")


def _messages(span: Span, key: str) -> list[Message]:
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
    if any(name.startswith("message.tool_calls.") for name in fields):
        refuse_tool_call(place)
    parts: dict[int, JsonObject] = {}
    for name, value in fields.items():
        if found := _PART.fullmatch(name):
            parts.setdefault(int(found[1]), {})[found[2]] = value
    content = fields.get("message.content") or [parts[index] for index in sorted(parts)]
    role = role_of(place, {"role": fields.get("message.role")})
    return Message(role=role, content=parts_text(place, content))


def _parameters(span: Span) -> JsonObject:
    try:
        return msgspec.json.decode(span.text("llm.invocation_parameters") or "{}", type=JsonObject)
    except msgspec.DecodeError as error:
        raise ImportFileError(
            f"{span.place}: llm.invocation_parameters is not a JSON object: {error}"
        ) from error
