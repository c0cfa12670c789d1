"""The spans of one request, before they are stored."""

import json
from typing import Any

import pytest

from babylon.serving.gateway.auth import Principal
from babylon.serving.gateway.play.span_steps import PlaySpan
from babylon.serving.gateway.telemetry.otlp import JSON, told_spans
from babylon.serving.gateway.telemetry.receiver import _Batch
from babylon.serving.openai_wire import RequestError
from tests.unit.formats.test_spans import chat

CALLER = Principal(key_id="k", digest=b"", scopes=frozenset())
TRACE = "a" * 32
KINDS = {str: "stringValue", int: "intValue", float: "doubleValue"}
TOOL = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "sh"}


def batch(*spans: dict[str, Any]) -> _Batch:
    """Spans of one trace below a root that is in another request."""
    sent = [
        {
            "traceId": TRACE,
            "spanId": f"{number:016x}",
            "parentSpanId": "f" * 16,
            "startTimeUnixNano": "1763114400000000000",
            "endTimeUnixNano": "1763114401000000000",
            "attributes": [
                {"key": name, "value": {KINDS[type(value)]: value}} for name, value in span.items()
            ],
        }
        for number, span in enumerate(spans, 1)
    ]
    body = {"resourceSpans": [{"scopeSpans": [{"spans": sent}]}]}
    return _Batch(CALLER, told_spans(JSON, json.dumps(body).encode()))


def stored(one: _Batch) -> list[PlaySpan]:
    """State that a finish reads."""
    return [
        PlaySpan.model_validate_json(span.span) for span in one.by_trajectory({}).get(TRACE, [])
    ]


@pytest.mark.parametrize("depth", [150, 197, 198, 199, 200, 256, 257, 900])
def test_whatever_is_stored_can_be_read_again_and_what_is_too_deep_is_rejected(depth: int) -> None:
    """A span that cannot be read would end each gateway that finishes its trajectory."""
    deep = '{"a":' * depth + "1" + "}" * depth
    one = batch({**TOOL, "gen_ai.tool.call.arguments": deep}, TOOL)
    assert len(stored(one)) + one.rejected == 2
    assert one.rejected == (depth > 198)
    assert ("nested too deep" in one.why) == (depth > 198)


def test_a_call_that_a_rule_keeps_out_does_not_come_in_as_a_span() -> None:
    said = chat("my card is 4111", "ok", **{"gen_ai.response.id": "unrecorded-1"})
    one = batch(said)
    (span,) = one.by_trajectory({})[TRACE]
    assert "4111" not in span.span
    assert PlaySpan.model_validate_json(span.span).call_id == "unrecorded-1"


def test_spans_of_embeddings_alone_make_no_trajectory() -> None:
    embedding = {"gen_ai.operation.name": "embeddings"}
    assert batch(embedding).by_trajectory({}) == {}
    assert len(stored(batch(embedding, {"gen_ai.operation.name": "invoke_agent"}))) == 2


def test_ids_may_be_written_in_capitals() -> None:
    span = {"traceId": "AB" * 16, "spanId": "CD" * 8, "attributes": []}
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
    (told,) = told_spans(JSON, json.dumps(body).encode())
    assert (told.value["traceId"], told.value["spanId"]) == ("ab" * 16, "cd" * 8)


@pytest.mark.parametrize("body", [b'{"resourceSpans":[{"x":"\xff"}]}', b"[]", b'{"a":'])
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="the body is no ExportTraceServiceRequest"):
        told_spans(JSON, body)


def test_spans_of_an_older_openllmetry_come_in() -> None:
    (span,) = stored(
        batch(
            {
                "llm.request.type": "chat",
                "gen_ai.prompt.0.role": "user",
                "gen_ai.prompt.0.content": "hi",
                "gen_ai.completion.0.role": "assistant",
                "gen_ai.completion.0.content": "ho",
            }
        )
    )
    assert span.call and span.call.response == "ho"
