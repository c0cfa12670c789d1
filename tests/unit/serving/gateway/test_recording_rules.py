"""Opt-out, sampling and redaction of recorded calls."""

import json
from dataclasses import replace

import msgspec
import pytest

from babylon.serving.gateway.recording_rules import UNRECORDED, RecordingRules
from babylon.store.recording_rules import RecordingRule, RuleKind
from tests.unit.serving.gateway.calls import CALL, call

SECRET = "4111 1111"
PAID = call(
    1,
    agent_id="crowd-7",
    key_id="k1",
    messages='[{"role":"user","content":"pay"},{"role":"tool","card":"4111 1111","n":null}]',
    answer=msgspec.json.encode(
        {"tool_calls": [{"function": {"arguments": '{"to":{"card":"4111 1111"}}'}}]}
    ).decode(),
)


def ruled(*rules: tuple[RuleKind, str, float, tuple[str, ...]]) -> RecordingRules:
    made = RecordingRules()
    made.set(RecordingRule(kind=k, subject=s, share=n, redact=r) for k, s, n, r in rules)
    return made


def test_who_has_no_rule_is_recorded_as_is() -> None:
    rules = ruled(("agent", "alice", 0, ()), ("key", "k2", 0, ()), ("agent", "crow*", 1, ("ssn",)))
    assert rules.applied(PAID) is PAID
    assert RecordingRules().applied(PAID) is PAID


@pytest.mark.parametrize("rule", [("agent", "crowd-*"), ("agent", "crowd-7"), ("key", "k1")])
def test_an_opt_out_of_key_or_agent_records_nothing(rule: tuple[RuleKind, str]) -> None:
    assert ruled((*rule, 0.0, ())).applied(PAID) is None


def test_a_trajectory_is_sampled_as_a_whole() -> None:
    rules = ruled(("agent", "agent", 0.25, ()))
    kept = 0
    for number in range(400):
        calls = [call(n, trajectory_id=f"t{number}") for n in range(3)]
        recorded = {rules.applied(one) is not None for one in calls}
        assert len(recorded) == 1
        kept += recorded == {True}
    assert 70 < kept < 130


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_a_redacted_thought_is_left_out_under_each_of_its_names(name: str) -> None:
    """Messages and Responses become chats with both names, and engines may answer with both."""
    both = {"role": "assistant", "content": "ok", "reasoning": SECRET, "reasoning_content": SECRET}
    thought = call(2, messages=json.dumps([both]), answer=json.dumps(both))
    left = ruled(("agent", "agent", 1, (name,))).applied(thought)
    assert left and SECRET not in str(left)
    assert not left.trainable


def test_redacted_values_are_nowhere_in_the_record() -> None:
    left = ruled(("key", "k1", 1, ("card",))).applied(PAID)
    assert left and SECRET not in str(left)
    assert '"content":"pay"' in left.messages and '"n":null' in left.messages
    assert (left.trainable, left.untrainable_reason) == (False, "fields were redacted")
    assert not (left.prompt_token_ids or left.completion_token_ids or left.logprobs)


@pytest.mark.parametrize("field", ["response", "content"])
def test_the_answers_text_is_redacted_where_it_stands_twice(field: str) -> None:
    message = {"role": "assistant", "content": SECRET, "tool_calls": [{"id": "1"}]}
    said = call(1, response=SECRET, answer=msgspec.json.encode(message).decode())
    left = ruled(("agent", "agent", 1, (field,))).applied(said)
    assert left and SECRET not in str(left)
    assert '"tool_calls":[{"id":"1"}]' in (left.answer or "")


@pytest.mark.parametrize(
    "text",
    [
        '{"to": {"card": "4111 1111"}}',  # a tool's result, or an answer in JSON mode
        'Paid with {"card": "4111 1111"}.',
        '{"card": "4111 11',  # cut at the token limit
        '["{\\"card\\": \\"4111 1111\\"}"]',
        "{'card': '4111 1111', 'paid': True}",  # a tool's result, as Python's str writes it
        str({"tool": "pay", "result": str({"card": "O'Brien 4111 1111"})}),  # a quote in quotes
        '{"card": "4111 1111", "card": null}',  # a decoder sees the last one only
        '[{"to": {"card": "4111 1111"}, "to": 2}]',
    ],
)
def test_json_in_texts_is_redacted_too(text: str) -> None:
    result = [{"role": "tool", "content": text}, {"role": "user", "content": [{"text": text}]}]
    written = call(1, messages=msgspec.json.encode(result).decode(), response=text)
    left = ruled(("agent", "agent", 1, ("card",))).applied(written)
    assert left and "4111" not in str(left)
    assert (left.trainable, left.prompt_token_ids) == (False, [])


@pytest.mark.parametrize("depth", [120, 450, 900])
def test_what_is_nested_too_deep_to_search_is_left_out_and_the_rest_keeps_its_form(
    depth: int,
) -> None:
    deep = '{"a":' * depth + '{"card":"4111"}' + "}" * depth
    written = call(
        1,
        messages=f'[{{"role":"user","content":[{deep}]}}]',
        parameters=f'{{"metadata":{deep}}}',
        answer=f'{{"role":"assistant","content":"hi","extra":{deep}}}',
    )
    left = ruled(("agent", "agent", 1, ("card",))).applied(written)
    assert left and "4111" not in str(left) and not left.trainable
    (message,) = json.loads(left.messages)
    assert message["role"] == "user"
    assert json.loads(left.parameters)["metadata"] and json.loads(left.answer or "")["extra"]


@pytest.mark.parametrize(
    "text", ['{"gr\\u00f6\\u00DFe": 41}', 'It is {"gr\\u00f6\\u00dfe": 41, "a']
)
def test_a_field_is_found_however_its_name_is_escaped(text: str) -> None:
    """Python's json escapes what is not ASCII."""
    written = call(1, messages=json.dumps([{"role": "tool", "content": text}]), response=text)
    left = ruled(("agent", "agent", 1, ("größe",))).applied(written)
    assert left and "41" not in left.messages + left.response


def test_a_field_is_found_where_a_slash_is_escaped() -> None:
    written = call(1, response='{"pay\\/card": 4111}')
    left = ruled(("agent", "agent", 1, ("pay/card",))).applied(written)
    assert left and "4111" not in left.response


@pytest.mark.parametrize("prompt", [[123, 34], [[123], [34]], ["a text", [123]]])
def test_a_prompt_of_token_ids_cannot_be_searched_and_is_left_out(prompt: list[object]) -> None:
    rules = ruled(("agent", "agent", 1, ("card",)))
    left = rules.applied(call(1, messages=json.dumps({"prompt": prompt}), response="ok"))
    assert left and json.loads(left.messages) == {"prompt": "[redacted]"}
    assert (left.trainable, left.prompt_token_ids) == (False, [])
    texts = call(1, messages='{"prompt":["a text","another"]}', response="ok")
    assert rules.applied(texts) is texts


def test_a_text_that_only_speaks_of_the_field_stays() -> None:
    spoken = call(1, response="my card is lost", messages='[{"content":"[card] or {card}?"}]')
    assert ruled(("agent", "agent", 1, ("card",))).applied(spoken) is spoken


def test_before_a_call_it_is_known_whether_it_will_be_recorded() -> None:
    rules = ruled(("agent", "agent", 0.5, ()))
    for number in range(50):
        one = call(number, trajectory_id=None)
        left_out = rules.applied(one) is None
        assert rules.leave_out(None, "agent", one.call_id) == left_out
        named = call(0, trajectory_id=None, agent_id="agent")
        named = replace(named, call_id=UNRECORDED + one.call_id)  # what it is called then
        assert (rules.applied(named) is None) == left_out
    assert not rules.leave_out(None, "another", "t")


def test_arguments_that_are_no_json_are_left_out_as_a_whole() -> None:
    broken = PAID.answer and PAID.answer.replace('111\\"}}', "111")
    left = ruled(("key", "k1", 1, ("card",))).applied(call(1, key_id="k1", answer=broken))
    assert left and SECRET not in str(left.answer)


def test_messages_are_a_field_like_any_other() -> None:
    left = ruled(("agent", "agent", 1, ("messages",))).applied(CALL)
    assert left and left.messages == '[{"role":"user","content":"[redacted]"}]'
    assert (left.response, left.trainable, left.prompt_token_ids) == ("BUY", False, [])
    text = call(1, messages='{"prompt":"messages"}')  # of a completion
    assert ruled(("agent", "agent", 1, ("messages",))).applied(text) is text


def test_content_covers_the_answer_too() -> None:
    left = ruled(("agent", "agent", 1, ("content",))).applied(CALL)
    assert left and "BUY" not in str(left) and "é" not in left.messages
