"""Each rejection reason by name, and what an accepted row becomes."""

from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pytest

from babylon.core.types import Rejection
from babylon.quality import row_checks
from babylon.quality.decode import Reason
from babylon.quality.row_checks import Accepted, check_row
from tests.unit.quality.rows import QUALITY, WINDOW, call, compact, real_rows, row, step, steps

NAN_STEP = step(0, environmentState={"agentBalance": 1, "agentPnL": None, "openPositions": 0})
DEEP = "[" * 100_000 + "]" * 100_000


def with_step(**changes):
    return [*steps(4), step(4, **changes)]


def without(mapping, key):
    return {name: value for name, value in mapping.items() if name != key}


BAD_ROWS = {
    "started an hour later": (row(start=WINDOW.end), Reason.OTHER_WINDOW, "10:00:00"),
    "started a moment before": (
        row(start=WINDOW.start - timedelta(milliseconds=1)),
        Reason.OTHER_WINDOW,
        "08:59:59",
    ),
    "no start": (row(start=None), Reason.OTHER_WINDOW, "startTime is infinite"),
    "no end": (row(end=None), Reason.OTHER_WINDOW, "endTime is infinite"),
    "cut off": (row(compact(steps())[:-9]), Reason.MALFORMED_JSON, "stepsJson: "),
    "empty text": (row(""), Reason.MALFORMED_JSON, "stepsJson: "),
    "an object for a list": (row("{}"), Reason.MALFORMED_JSON, "stepsJson: Expected `array`"),
    "wrong type": (row(with_step(llmCalls="x")), Reason.MALFORMED_JSON, "stepsJson[4].llmCalls: "),
    "bad metrics": (row(metrics_json="[]"), Reason.MALFORMED_JSON, "metricsJson: "),
    "bad metadata": (row(metadata_json="{"), Reason.MALFORMED_JSON, "metadataJson: "),
    "bad components": (row(reward_components_json="1"), Reason.MALFORMED_JSON, "rewardComponents"),
    "duplicate key": (row('[{"a":1,"a":2}]'), Reason.MALFORMED_JSON, "key 'a' occurs twice"),
    "zero character": (row(with_step(note="a\0b")), Reason.MALFORMED_JSON, r"\u0000"),
    "65-bit integer": (row(f"[{2**64}]"), Reason.MALFORMED_JSON, "64 bits"),
    "endless integer": (row("9" * 5000), Reason.MALFORMED_JSON, "out of range"),
    "lone surrogate": (row(r'["\ud800"]'), Reason.MALFORMED_JSON, "stepsJson: "),
    "deep nesting": (row(DEEP), Reason.MALFORMED_JSON, "levels deep"),
    "negative temperature": (
        row(with_step(llmCalls=[call(temperature=-1)])),
        Reason.MALFORMED_JSON,
        "stepsJson[4].llmCalls[0].temperature",
    ),
    "no action": (
        row([*steps(4), without(step(4), "action")]),
        Reason.MISSING_FIELD,
        "stepsJson[4].action",
    ),
    "no P&L": (row(with_step(environmentState={})), Reason.MISSING_FIELD, "agentPnL"),
    "no prompt": (
        row(with_step(llmCalls=[without(call(), "userPrompt")])),
        Reason.MISSING_FIELD,
        "stepsJson[4].llmCalls[0].userPrompt",
    ),
    "empty prompts": (
        row(with_step(llmCalls=[call(systemPrompt="", userPrompt="")])),
        Reason.MISSING_FIELD,
        "stepsJson[4].llmCalls[0].userPrompt is empty",
    ),
    "NaN": (row('[{"x":NaN}]'), Reason.NON_FINITE_NUMBER, "NaN"),
    "minus infinity": (row('[{"x":-Infinity}]'), Reason.NON_FINITE_NUMBER, "-Infinity"),
    "too large a number": (row("[1e999]"), Reason.NON_FINITE_NUMBER, "stepsJson[0]"),
    "JavaScript's NaN": (row([NAN_STEP]), Reason.NON_FINITE_NUMBER, "environmentState.agentPnL"),
    "reward NaN": (row(total_reward=float("nan")), Reason.NON_FINITE_NUMBER, "totalReward"),
    "P&L infinite": (row(final_pnl_usd=float("inf")), Reason.NON_FINITE_NUMBER, "finalPnL"),
    "P&L of no game": (row(final_pnl_usd=1e200), Reason.NON_FINITE_NUMBER, "finalPnL"),
    "no steps": (row([]), Reason.EMPTY_STEPS, "[]"),
    "records too large": (row(gateway_json="null"), Reason.TOO_MANY_CALLS, "too large to be read"),
    "a step twice": (row([*steps(), step(4)]), Reason.STEP_ORDER, "[5].stepNumber is 4 after 4"),
    "pending": (
        row(with_step(action={"actionType": "pending", "success": False})),
        Reason.UNFINISHED_STEP,
        "stepsJson[4].action",
    ),
    "nobody asked": (
        row([step(number, llmCalls=[]) for number in range(9)]),
        Reason.NO_LLM_CALL,
        "9 steps",
    ),
    "only evaluation": (
        row([step(number, llmCalls=[call(purpose="evaluation")]) for number in range(9)]),
        Reason.NO_LLM_CALL,
        "9 steps",
    ),
    "blank answer": (
        row(with_step(llmCalls=[call(), call(response=" ")])),
        Reason.NO_RESPONSE,
        "stepsJson[4].llmCalls[1].response",
    ),
    "no answer": (
        row(with_step(llmCalls=[without(call(), "response")])),
        Reason.NO_RESPONSE,
        "stepsJson[4].llmCalls[0].response",
    ),
    "four actions": (row(steps(4)), Reason.TOO_FEW_ACTIONS, "4 actions, minimum is 5"),
    "low reward": (row(total_reward=0.4), Reason.BELOW_REWARD_THRESHOLD, "0.4 is below 0.5"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_rejected_for_a_named_reason_with_its_place(name):
    bad, reason, place = BAD_ROWS[name]
    quality = QUALITY.model_copy(update={"reward_threshold": 0.5})
    verdict = check_row(bad, WINDOW, quality)
    assert isinstance(verdict, Rejection)
    assert (verdict.trajectory_id, verdict.reason) == ("t1", reason)
    assert place in verdict.detail


def test_every_reason_is_covered():
    scorers = {
        Reason.NOT_READABLE,
        Reason.TOO_LONG_FOR_JUDGE,
        Reason.JUDGE_REFUSED,
        Reason.NO_JUDGMENT,
        Reason.NO_FEEDBACK,
    }
    assert {reason for _, reason, _ in BAD_ROWS.values()} == set(Reason) - scorers


def test_the_reward_threshold_is_off_unless_set():
    assert isinstance(check_row(row(total_reward=-9.0), WINDOW, QUALITY), Accepted)


def test_keys_of_the_second_writer_are_accepted():
    older = step(
        4,
        stepId="s4",
        observation={},
        done=True,
        llmCalls=[call(promptTokens=9, latencyMs=3)],
        action={"actionType": "HOLD", "actionName": "x", "attemptId": "a", "success": True},
    )
    assert isinstance(check_row(row([*steps(4), older], window_id=None), WINDOW, QUALITY), Accepted)


def test_a_reply_of_tool_calls_is_a_response():
    called = {"id": "x", "type": "function", "function": {"name": "price", "arguments": "{}"}}
    accepted = check_row(
        row(with_step(llmCalls=[call(response="", toolCalls=[called])])), WINDOW, QUALITY
    )
    assert isinstance(accepted, Accepted)
    assert any(one.tool_calls == (called,) for one in accepted.trajectory.calls)
    none = check_row(row(with_step(llmCalls=[call(response="", toolCalls=[])])), WINDOW, QUALITY)
    assert isinstance(none, Rejection) and none.reason == Reason.NO_RESPONSE


def test_fields_of_a_call_that_training_does_not_read_may_have_any_type():
    odd = call(model=7, maxTokens=None, latencyMs=3.5, reasoning={}, messages="x", response="BUY")
    accepted = check_row(row([*steps(4), step(4, llmCalls=[odd])]), WINDOW, QUALITY)
    assert isinstance(accepted, Accepted)
    assert accepted.trajectory.calls[4].response == "BUY"
    for wrong in ({"response": 7}, {"temperature": "hot"}, {"systemPrompt": None}):
        refused = check_row(row(with_step(llmCalls=[odd | wrong])), WINDOW, QUALITY)
        assert isinstance(refused, Rejection) and refused.reason == Reason.MALFORMED_JSON


def test_pretty_printed_and_escaped_json_is_as_good_as_compact():
    import json

    pretty = json.dumps(with_step(note="naïve 🚀 \\u0000 as text", price=1.0), indent=1)
    assert isinstance(check_row(row(pretty), WINDOW, QUALITY), Accepted)


def accepted(bad_or_good):
    verdict = check_row(bad_or_good, WINDOW, QUALITY)
    assert isinstance(verdict, Accepted), verdict
    return verdict.trajectory


def test_profit_is_what_was_made_inside_the_window():
    lifetime = [
        step(n, environmentState={"agentBalance": 1, "agentPnL": 500 + n, "openPositions": 0})
        for n in range(5)
    ]
    assert accepted(row(lifetime)).pnl_usd == 4
    assert accepted(row(lifetime, metrics_json='{"finalPnL":520}')).pnl_usd == 20
    assert accepted(row(lifetime, final_pnl_usd=530.0)).pnl_usd == 30


def test_wins_come_from_correctness_else_from_realised_profit():
    def act(kind, success=True, **rest):
        return {"actionType": kind, "success": success, **rest}

    actions = [
        act("BUY_SHARES", correctness={"predictionCorrect": True}),
        act("BUY_SHARES", correctness={"predictionCorrect": False}),
        act("CLOSE_PERP_POSITION", correctness={"perpCorrect": True}, result={"pnl": -1}),
        act("SELL_SHARES", result={"pnl": 3.5}),
        act("SELL_SHARES", result={"pnl": 0}),
        act("SELL_SHARES", result={"pnl": 9}, success=False),
        act("SELL_SHARES", result="sold"),
        act("BUY_SHARES", result={"pnl": 5}),
        act("HOLD"),
    ]
    trajectory = accepted(row([step(n, action=action) for n, action in enumerate(actions)]))
    assert (trajectory.wins, trajectory.trades) == (3, 5)
    assert (trajectory.actions, trajectory.steps) == (7, 9)


def test_the_scenario_is_the_window_unless_the_row_says_otherwise():
    assert accepted(row()).scenario_id == WINDOW.id
    assert accepted(row(scenario_id="arena-1")).scenario_id == "arena-1"


def test_the_real_window_has_five_eligible_agents_and_ten_rows_without_a_call():
    verdicts = [check_row(game_row, WINDOW, QUALITY) for game_row in real_rows()]
    sound = [verdict.trajectory for verdict in verdicts if isinstance(verdict, Accepted)]
    assert {trajectory.agent_id for trajectory in sound} == {
        f"test-agent-{number}" for number in range(1, 6)
    }
    assert all(29 <= trajectory.steps <= 33 for trajectory in sound)
    assert all(len(trajectory.calls) == trajectory.steps for trajectory in sound)
    assert all(call.retokenized for trajectory in sound for call in trajectory.calls)
    reasons = Counter(v.reason for v in verdicts if isinstance(v, Rejection))
    assert reasons == {Reason.NO_LLM_CALL: 10}


def test_a_live_agents_lifetime_profit_is_not_this_windows():
    game_row = next(r for r in real_rows() if r.final_pnl_usd == -17.67)
    asked = game_row.steps_json.replace('"llmCalls":[]', f'"llmCalls":[{compact(call())}]')
    quality = QUALITY.model_copy(update={"min_actions": 1})
    verdict = check_row(replace(game_row, steps_json=asked), WINDOW, quality)
    assert isinstance(verdict, Accepted)
    assert verdict.trajectory.pnl_usd == 0


def test_an_error_that_only_one_row_causes_rejects_it_without_its_values(monkeypatch):
    def fails(*arguments):
        raise ValueError("the row's own secret")

    monkeypatch.setattr(row_checks, "payoffs", fails)
    verdict = check_row(row(), WINDOW, QUALITY)
    assert isinstance(verdict, Rejection) and verdict.reason == Reason.MALFORMED_JSON
    assert "ValueError at test_row_checks.py" in verdict.detail and "secret" not in verdict.detail


def test_a_lack_of_memory_is_no_fault_of_a_row(monkeypatch):
    def fails(*arguments):
        raise MemoryError

    monkeypatch.setattr(row_checks, "payoffs", fails)
    with pytest.raises(MemoryError):
        check_row(row(), WINDOW, QUALITY)
