"""The spans of one request, before they are stored."""

import json
from typing import Any

import pytest

from babylon.serving.gateway.auth import Principal
from babylon.serving.gateway.play.span_steps import PlaySpan
from babylon.serving.gateway.telemetry.otlp import JSON, told_spans
from babylon.serving.gateway.telemetry.receiver import _Batch
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
