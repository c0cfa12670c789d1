"""The JSON of a step: keys, absent keys, and refused values."""

import json
import math
from datetime import UTC, datetime
from functools import reduce
from typing import Any

import pytest

from babylon.core.errors import RecorderError
from babylon.core.windows import window_at
from babylon.recorder import Action, LlmCall, ProviderAccess
from babylon.recorder.trajectory import OpenTrajectory, call_row, encode_step, game_time

AT = datetime(2025, 11, 14, 9, 2, 0, 20_000, tzinfo=UTC)
STATE = {"agentBalance": 1000, "agentPnL": 0, "openPositions": 1}
HOLD = Action(action_type="HOLD", success=True, parameters={})


def _call(**changes: Any) -> LlmCall:
    fields: dict[str, Any] = {
        "model": "babylon",
        "system_prompt": "You trade.",
        "user_prompt": "Price $1.",
        "response": "HOLD",
        "temperature": 0.7,
        "max_tokens": 150,
        "purpose": "action",
    }
    return LlmCall(**{**fields, **changes})


def _step(**changes: Any) -> dict[str, Any]:
    parts: dict[str, Any] = {"state": STATE, "access": [], "calls": [], "action": HOLD, "reward": 0}
    parts |= changes
    text = encode_step(
        3, AT, parts["state"], parts["access"], parts["calls"], parts["action"], parts["reward"]
    )
    step: dict[str, Any] = json.loads(text)
    return step


@pytest.mark.parametrize("name", ["latency_ms", "max_tokens", "prompt_tokens", "completion_tokens"])
def test_a_number_that_the_call_log_cannot_hold_is_refused_by_name(name: str) -> None:
    _step(calls=[_call(**{name: 2**31 - 1})])
    with pytest.raises(
        RecorderError, match=rf"step 3: a call's {name} is 2147483648: send at most"
    ):
        _step(calls=[_call(**{name: 2**31})])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"), ("top_p", "1"), ("model", None), ("user_prompt", ["BUY"]),
        ("reasoning", {"why": "cheap"}), ("action_type", 5), ("prompt_tokens", "7"),
        ("max_tokens", None),
    ],
)  # fmt: skip
def test_a_type_that_the_call_log_cannot_hold_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RecorderError, match=rf"step 3: a call's {name} is of type"):
        _step(calls=[_call(**{name: value})])


@pytest.mark.parametrize(
    "wrong",
    [{"success": None}, {"action_type": None}, {"parameters": {"order": object()}}],
)
def test_a_step_whose_action_cannot_be_stored_is_not_added(wrong: dict[str, Any]) -> None:
    played = OpenTrajectory("t", "a", "s", window_at(AT, 60), AT, AT)
    known: dict[str, Any] = {"action_type": "BUY", "success": True, "parameters": {}}
    with pytest.raises(RecorderError, match="step 0"):
        played.add_step(AT, STATE, [], Action(**(known | wrong)), 0.0)
    assert played.add_step(AT, STATE, [], HOLD, 0.0) == 0


@pytest.mark.parametrize("wrong", [{"response": None}, {"response": 5}, {"purpose": "thought"}])
def test_only_a_whole_call_is_written(wrong: dict[str, Any]) -> None:
    with pytest.raises(RecorderError, match="give a text, and one of action, evaluation"):
        _step(calls=[_call(**wrong)])


def test_a_step_has_the_keys_of_the_game_and_drops_absent_ones() -> None:
    step = _step(
        calls=[_call(reasoning="flat")],
        access=[ProviderAccess(provider_name="market", data={"price": 1.5}, purpose="look")],
    )
    assert step == {
        "stepNumber": 3,
        "timestamp": 1763110920020,
        "environmentState": STATE,
        "providerAccesses": [{"providerName": "market", "data": {"price": 1.5}, "purpose": "look"}],
        "llmCalls": [
            {
                "model": "babylon",
                "systemPrompt": "You trade.",
                "userPrompt": "Price $1.",
                "response": "HOLD",
                "temperature": 0.7,
                "maxTokens": 150,
                "purpose": "action",
                "reasoning": "flat",
            }
        ],
        "action": {"actionType": "HOLD", "success": True, "parameters": {}},
        "reward": 0,
    }


def test_what_only_the_call_log_holds_is_not_in_the_step() -> None:
    call = _call(top_p=0.9, prompt_tokens=7, messages=({"role": "user", "content": "hi"},))
    assert not {"topP", "promptTokens", "messages"} & _step(calls=[call])["llmCalls"][0].keys()


@pytest.mark.parametrize(
    ("changes", "roles"),
    [
        ({}, ["system", "user"]),
        ({"system_prompt": ""}, ["user"]),
        ({"messages": ({"role": "user", "content": ""},)}, ["user"]),
    ],
)
def test_the_logged_messages_are_those_sent(changes: dict[str, Any], roles: list[str]) -> None:
    row = call_row(
        OpenTrajectory("t1", "a", "s", window_at(AT), AT, AT), 0, 0, _call(**changes), AT
    )
    assert [message["role"] for message in json.loads(row["messagesJson"])] == roles


def test_extra_keys_of_the_state_are_kept() -> None:
    assert _step(state={**STATE, "activeMarkets": 5})["environmentState"]["activeMarkets"] == 5


def test_a_state_needs_no_field_and_its_pnl_is_read_as_zero_then() -> None:
    assert _step(state={"board": [1]})["environmentState"] == {"agentPnL": 0.0, "board": [1]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": {"agentPnL": "0"}}, "step 3: agentPnL is '0': send a number of US dollars"),
        ({"reward": float("nan")}, "step 3 cannot be stored as JSON: Out of range float"),
        ({"state": {**STATE, "agentPnL": float("inf")}}, "Out of range float"),
        ({"calls": [_call(response="\ud800")]}, "surrogates not allowed"),
        ({"state": {**STATE, "object": object()}}, "not JSON serializable"),
        (
            {"state": {**STATE, "deep": reduce(lambda inner, _: [inner], range(9000), 1)}},
            "recursion",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecorderError, match=message):
        _step(**changes)


def test_a_nul_is_replaced_and_the_text_of_its_escape_is_not() -> None:
    texts = ["a\0\0b", "\\u0000", "\\\0", "\\\\u0000"]
    steps = [_step(calls=[_call(response=text)]) for text in texts]
    assert [step["llmCalls"][0]["response"] for step in steps] == [
        text.replace("\0", "\ufffd") for text in texts
    ]


@pytest.mark.parametrize(
    ("action_type", "trade"),
    [("BUY_SHARES", True), ("SELL_SHARES", True), ("OPEN_PERP_POSITION", True), ("HOLD", False)],
)
def test_trades_are_told_by_their_action_type(action_type: str, trade: bool) -> None:
    assert Action(action_type=action_type, success=True, parameters={}).is_trade is trade


def test_the_games_times_are_utc_without_zone() -> None:
    assert game_time(AT) == datetime(2025, 11, 14, 9, 2, 0, 20_000)


@pytest.mark.parametrize("reward", [None, "1", 10**400, math.nan, -math.inf, 1e308], ids=type)
def test_a_reward_that_no_finish_could_store_adds_no_step(reward: Any) -> None:
    played = OpenTrajectory("t1", "agent-1", "s1", window_at(AT), AT, AT, total_reward=1e308)
    with pytest.raises(RecorderError, match=r"step 0: reward .* is no finite number"):
        played.add_step(AT, STATE, [_call()], HOLD, reward)
    assert (played.steps, played.calls, played.total_reward) == ([], [], 1e308)
