"""Reader of spans in OpenTelemetry's GenAI semantic conventions.

https://github.com/open-telemetry/semantic-conventions-genai: ``gen_ai.system_instructions``,
``gen_ai.input.messages`` and ``gen_ai.output.messages``, on the span or on its event
``gen_ai.client.inference.operation.details``, structured or as a JSON string. Programs record them
only if asked to.
"""

import msgspec

from babylon.core.trajectories import Message
from babylon.formats.documents import ImportFileError, JsonObject, parts_text, role_of
from babylon.formats.otlp import Span, span_call
from babylon.formats.trace import TraceCall

OPERATION = "gen_ai.operation.name"
CALLS = ("chat", "text_completion", "generate_content")


def is_call(span: Span) -> bool:
    """Return True for a model call. Agents, tools and embeddings have spans as well."""
    return span.attributes.get(OPERATION) in CALLS


def read_call(span: Span) -> TraceCall:
    """Return the call of a chat span.

    Raises:
        ImportFileError: the messages were not recorded, or are not text.
    """
    get = span.attributes.get
    output = _messages(span, "gen_ai.output.messages")
    if len(output) != 1:
        raise ImportFileError(f"{span.place}: {len(output)} output messages, expected 1")
    instructions = _decoded(span, "gen_ai.system_instructions")
    system = (
        [Message(role="system", content=parts_text(span.place, instructions))]
        if instructions
        else []
    )
    return span_call(
        span,
        messages=[*system, *_messages(span, "gen_ai.input.messages")],
        response=output[0].content,
        model=get("gen_ai.response.model") or get("gen_ai.request.model"),
        temperature=get("gen_ai.request.temperature"),
        top_p=get("gen_ai.request.top_p"),
        max_tokens=get("gen_ai.request.max_tokens"),
        prompt_tokens=get("gen_ai.usage.input_tokens"),
        completion_tokens=get("gen_ai.usage.output_tokens"),
    )


def conversation(span: Span) -> str | None:
    return span.text("gen_ai.conversation.id")


def agent(span: Span) -> str | None:
    return span.text("gen_ai.agent.id") or span.text("gen_ai.agent.name")


def _messages(span: Span, key: str) -> list[Message]:
    raw = _decoded(span, key)
    if not isinstance(raw, list) or not raw:
        raise ImportFileError(
            f"{span.place}: {key} is missing: record content in the traced program"
            " (OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=span_only)"
        )
    messages = []
    for index, item in enumerate(raw):
        place = f"{span.place}: {key}[{index}]"
        role = role_of(place, item)
        messages.append(Message(role=role, content=parts_text(place, _parts(item))))
    return messages


def _parts(message: JsonObject) -> object:
    """Return the parts of a message. A tool's answer becomes a text part."""
    parts = message.get("parts")
    if not isinstance(parts, list):
        return parts
    return [
        {"type": "text", "content": part.get("response")}
        if isinstance(part, dict) and part.get("type") == "tool_call_response"
        else part
        for part in parts
    ]


def _decoded(span: Span, key: str) -> object:
    value = span.attributes.get(key)
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise ImportFileError(f"{span.place}: {key} is not JSON: {error}") from error
