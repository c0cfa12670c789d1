from datetime import UTC, datetime, timedelta
from typing import Any

from babylon.serving.gateway.play.events import ElsewhereCall, StepAction
from babylon.serving.gateway.play.span_steps import PlaySpan, first_agent, span_steps
from babylon.store.plays import PlayedCall

NOON = datetime(2025, 11, 14, 12, tzinfo=UTC)
ELSEWHERE = ElsewhereCall(messages=[{"role": "user", "content": "hi"}], response="ho")


def call(second: float, call_id: str | None = None, **more: Any) -> PlaySpan:
    return PlaySpan(at=NOON + timedelta(seconds=second), call_id=call_id, call=ELSEWHERE, **more)


def tool(second: float, name: str) -> PlaySpan:
    return PlaySpan(at=NOON + timedelta(seconds=second), action=StepAction(action_type=name))


def record(call_id: str, second: float) -> PlayedCall:
    return PlayedCall(
        call_id=call_id,
        trajectory_id=None,
        agent_id=None,
        step_number=None,
        started_at=NOON + timedelta(seconds=second),
        model="babylon-v0",
        policy_version=0,
        messages="[]",
        response="",
        temperature=1.0,
        top_p=1.0,
        max_tokens=0,
        latency_ms=0,
    )


def steps(spans: list[PlaySpan], *records: PlayedCall) -> list[tuple[list[Any], str]]:
    found = span_steps("t", spans, records)
    assert [step.number for _, step in found] == [*range(len(found))]
    return [(step.calls, step.action.action_type) for _, step in found]


def test_a_call_is_a_step_with_its_first_tool_and_further_tools_are_steps() -> None:
    spans = [tool(3, "buy"), call(2, "a"), tool(2.5, "look"), call(1), call(4)]
    assert steps(spans) == [
        ([ELSEWHERE], "RESPONSE"),
        ([ELSEWHERE], "look"),
        ([], "buy"),
        ([ELSEWHERE], "RESPONSE"),
    ]


def test_a_recorded_call_counts_once_at_the_time_that_the_agent_gives() -> None:
    """The gateway's clock is an hour ahead; its own span tells of the call too."""
    spans = [call(1, "a"), call(3600, "a"), tool(2, "look"), call(3, "b"), tool(4, "buy")]
    assert steps(spans, record("a", 3600), record("b", 3602)) == [(["a"], "look"), (["b"], "buy")]


def test_a_recorded_call_without_a_span_is_a_step_too() -> None:
    assert steps([tool(2, "look")], record("a", 1)) == [(["a"], "look")]


def test_a_span_that_only_names_an_unrecorded_call_is_no_step() -> None:
    assert steps([PlaySpan(at=NOON, call_id="gone"), PlaySpan(at=NOON, agent_id="a")]) == []


def test_the_id_of_an_unrecorded_call_is_a_step_once_and_has_its_tool() -> None:
    spans = [PlaySpan(at=NOON, call_id="unrecorded-1"), tool(1, "buy"), call(2, "unrecorded-1")]
    assert steps(spans) == [(["unrecorded-1"], "buy")]


def test_the_outermost_span_names_the_agent() -> None:
    assert first_agent([call(2, agent_id="inner"), call(1, agent_id="outer"), call(0)]) == "outer"
    assert first_agent([call(0)]) is None
