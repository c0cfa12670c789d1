from babylon.serving.gateway.play.events import (
    ElsewhereCall,
    FeedbackEvent,
    FinishEvent,
    StepAction,
    StepEvent,
)
from babylon.serving.gateway.play.ruled import Cover
from babylon.serving.gateway.recording_rules import REDACTED, RecordingRules
from babylon.store.recording_rules import RecordingRule

CALL = ElsewhereCall(messages=[{"role": "user", "card": "4111"}], response='{"card": "4111"}')
STEP = StepEvent(
    type="step",
    trajectory_id="t",
    number=3,
    state={"purse": [{"card": "4111"}], "round": 7},
    calls=["c1", CALL],
    action=StepAction(
        action_type="PAY", parameters={"card": "4111", "usd": 5}, result=["4111"], reasoning="so"
    ),
    reward=0.5,
)


def rules(share: float = 1.0, *fields: str) -> RecordingRules:
    found = RecordingRules()
    found.set([RecordingRule(kind="agent", subject="a", share=share, redact=fields)])
    return found


def cover(share: float = 1.0, *fields: str) -> Cover:
    found = Cover.of(rules(share, *fields), "k", "a", "t")
    assert found is not None
    return found


def test_rules_about_others_cover_nothing() -> None:
    assert Cover.of(rules(0.0), "k", "b", "t") is None
    assert Cover.of(RecordingRules(), "k", "a", "t") is None


def test_a_redacted_field_is_left_out_of_all_that_a_step_says() -> None:
    step = cover(1.0, "card", "reasoning").over(STEP)
    assert "4111" not in step.model_dump_json().replace('["4111"]', "")
    assert step.state == {"purse": [{"card": REDACTED}], "round": 7}
    assert step.action.parameters == {"card": REDACTED, "usd": 5}
    assert step.action.result == ["4111"]  # no field names it
    assert step.action.reasoning == REDACTED
    assert (step.calls[0], step.reward) == ("c1", 0.5)
    assert StepEvent.model_validate_json(step.model_dump_json(exclude_unset=True)) == step


def test_a_field_of_an_event_itself_is_left_out_by_its_name() -> None:
    names = ("state", "messages", "tool_calls", "parameters", "correctness", "knowledge", "comment")
    given = STEP.model_copy(
        update={
            "calls": [CALL.model_copy(update={"response": "", "tool_calls": [{"a": "4111"}]})],
            "action": StepAction(parameters={"usd": "4111"}, correctness={"right": "4111"}),
        }
    )
    step = cover(1.0, *names, "label").over(given)
    assert "4111" not in step.model_dump_json()
    assert StepEvent.model_validate_json(step.model_dump_json(exclude_unset=True)) == step
    finish = FinishEvent(type="finish", trajectory_id="t", knowledge={"a": "4111"})
    assert cover(1.0, *names).over(finish).knowledge == {}
    said = FeedbackEvent(type="feedback", trajectory_id="t", label="4111", comment="4111")
    covered = cover(1.0, *names, "label").over(said)
    assert (covered.label, covered.comment) == (REDACTED, REDACTED)


def test_of_a_trajectory_that_is_left_out_the_shape_stays() -> None:
    step = cover(0.0).over(STEP)
    assert (step.number, step.calls, step.reward) == (3, ["c1"], 0.5)
    assert (step.state, step.action.action_type, step.action.parameters) == ({}, "PAY", {})
    assert (step.action.result, step.action.reasoning) == (REDACTED, REDACTED)
    finish = FinishEvent(type="finish", trajectory_id="t", knowledge={"a": 1}, final_pnl=2.0)
    assert cover(0.0).over(finish) == finish.model_copy(update={"knowledge": {}})
    said = FeedbackEvent(type="feedback", trajectory_id="t", value=1.0, comment="4111")
    assert cover(0.0).over(said) == said.model_copy(update={"comment": REDACTED})


def test_a_repeated_event_is_covered_alike() -> None:
    short = StepEvent(type="step", trajectory_id="t", number=0, state={"card": "4111"})
    texts = {cover(1.0, "card").over(short).model_dump_json(exclude_unset=True) for _ in range(2)}
    assert texts == {'{"type":"step","trajectory_id":"t","number":0,"state":{"card":"[redacted]"}}'}
