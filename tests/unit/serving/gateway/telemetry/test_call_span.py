import json
from dataclasses import replace
from typing import Any

import pytest

from babylon.serving.gateway.recording_rules import RecordingRules
from babylon.serving.gateway.telemetry.call_span import MAX_CONTENT_BYTES, attributes, content
from babylon.store.recording_rules import RecordingRule
from tests.unit.serving.gateway.calls import CALL
from tests.unit.serving.gateway.test_exchange import answer, exchange


def told(**fields: Any) -> dict[str, Any]:
    return attributes(exchange(**fields), "200", "/v1/chat/completions")


def test_what_no_engine_takes_is_no_attribute() -> None:
    """The SDK would drop the whole batch of a span with a number beyond 64 bits."""
    found = told(top_k=10**30, presence_penalty="x", frequency_penalty=[1], top_p=0.5)
    assert {name for name in found if "request" in name} == {
        "gen_ai.request.model",
        "gen_ai.request.top_p",
    }


def test_a_call_without_an_answer_has_no_usage_and_a_call_with_one_has() -> None:
    call = exchange(n=2, stop="said")
    before = attributes(call, "left", "/v1/chat/completions")
    assert before["error.type"] == "left" and before["gen_ai.request.choice.count"] == 2
    assert "said" not in str(before)  # they are words of the prompt
    assert not any(name.startswith("gen_ai.usage") for name in before)
    call.note(answer())
    after = attributes(call, "200", "/v1/chat/completions")
    assert (after["gen_ai.usage.input_tokens"], after["gen_ai.usage.output_tokens"]) == (3, 2)
    assert "error.type" not in after and "gen_ai.response.time_to_first_chunk" not in after


def test_the_newest_messages_of_a_long_prompt_are_kept() -> None:
    messages = [{"role": "user", "content": f"{number}" * 1000} for number in range(9)] * 20
    found = content(replace(CALL, messages=json.dumps(messages)))
    kept = json.loads(str(found["gen_ai.input.messages"]))
    assert 0 < len(kept) < len(messages)
    assert len(str(found["gen_ai.input.messages"])) <= MAX_CONTENT_BYTES + 2
    assert kept[-1]["parts"] == [{"type": "text", "content": "8" * 1000}]


@pytest.mark.parametrize(
    ("messages", "parts"),
    [
        ('{"prompt":"Say"}', [{"type": "text", "content": "Say"}]),
        ('[{"role":"assistant","content":null,"tool_calls":[3,{"function":7}]}]', None),
        ('[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url"}]}]',
         [{"type": "text", "content": "a[image_url]"}]),
    ],
)  # fmt: skip
def test_prompts_of_any_form_become_parts(messages: str, parts: list[Any] | None) -> None:
    found = content(replace(CALL, messages=messages))
    (message,) = json.loads(str(found["gen_ai.input.messages"]))
    assert parts is None or message["parts"] == parts


@pytest.mark.parametrize("written", ["[" * 5000, "[" * 5000 + "]" * 5000, "[" * 300 + "]" * 300])
def test_arguments_that_are_nested_too_deep_stay_text(written: str) -> None:
    calls = [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": written}}]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    found = content(replace(CALL, response="", answer=json.dumps(said)))
    (message,) = json.loads(str(found["gen_ai.output.messages"]))
    assert message["parts"][0]["arguments"] == written


def test_arguments_that_are_no_json_stay_text() -> None:
    calls = [{"id": "t1", "type": "function", "function": {"name": "price", "arguments": "{NVDA"}}]
    said = {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "hm"}
    found = content(replace(CALL, response="", answer=json.dumps(said)))
    assert json.loads(str(found["gen_ai.output.messages"])) == [
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "hm"},
                {"type": "tool_call", "id": "t1", "name": "price", "arguments": "{NVDA"},
            ],
            "finish_reason": "stop",
        }
    ]


def test_a_tool_that_is_no_object_costs_no_span() -> None:
    found = content(replace(CALL, parameters='{"tools":[1,{"type":"function"}]}'))
    assert json.loads(str(found["gen_ai.tool.definitions"]))[1] == {"type": "function"}


def test_tools_that_a_rule_redacts_as_a_whole_are_no_attribute() -> None:
    """A failed span would break a connection whose answer is already sent."""
    rules = RecordingRules()
    fields = ("tools", "tool_calls", "role")
    rules.set([RecordingRule(kind="agent", subject="agent", share=1, redact=fields)])
    said = '{"role":"assistant","content":"hi","tool_calls":[{"id":"a","function":{"name":"f"}}]}'
    tools = '{"tools":[{"type":"function","function":{"name":"secret"}}]}'
    allowed = rules.applied(replace(CALL, parameters=tools, answer=said))
    assert allowed and not allowed.trainable
    found = content(allowed)
    assert "gen_ai.tool.definitions" not in found and "secret" not in str(found)
