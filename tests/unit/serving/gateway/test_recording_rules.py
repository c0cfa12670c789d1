"""Opt-out, sampling and redaction of recorded calls."""

import msgspec
import pytest

from babylon.serving.gateway.recording_rules import RecordingRules
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


def test_redacted_values_are_nowhere_in_the_record() -> None:
    left = ruled(("key", "k1", 1, ("card",))).applied(PAID)
    assert left and SECRET not in str(left)
    assert '"content":"pay"' in left.messages and '"n":null' in left.messages
    assert (left.trainable, left.untrainable_reason) == (False, "fields were redacted")
    assert not (left.prompt_token_ids or left.completion_token_ids or left.logprobs)


def test_arguments_that_are_no_json_are_left_out_as_a_whole() -> None:
    broken = PAID.answer and PAID.answer.replace('111\\"}}', "111")
    left = ruled(("key", "k1", 1, ("card",))).applied(call(1, key_id="k1", answer=broken))
    assert left and SECRET not in str(left.answer)


def test_content_covers_the_answer_too() -> None:
    left = ruled(("agent", "agent", 1, ("content",))).applied(CALL)
    assert left and "BUY" not in str(left) and "é" not in left.messages
