"""Chat messages, one conversation a line."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from babylon.core.windows import window_at
from babylon.formats.chat_lines import read_chats, write_chat
from babylon.formats.trace import RESPONSE, ImportFileError, Tokens, Trace
from babylon.formats.trace_rows import trace_rows
from tests.unit.formats.traces import (
    NOON,
    call,
    document,
    message,
    step,
    tokens,
    tool_call,
    trace,
    without_place,
)


def read(*lines: Any) -> list[Trace]:
    return [without_place(one) for one in read_chats(map(document, lines), "imported")]


def test_calls_come_back_but_not_what_became_of_them() -> None:
    one = trace(
        step(0, call("tick 0", top_p=0.9), tokens={0: tokens()}),
        step(1, call("think", purpose="reasoning"), call("tick 1")),
    )
    (back,) = read(*write_chat(one))
    assert (back.trajectory_id, back.agent_id, back.window_id) == ("t1", "agent-1", one.window_id)
    assert (back.start, back.final_pnl) == (one.start, 10.0)
    assert [s.reward for s in back.steps] == [0.25, 0.25]
    assert [s.at for s in back.steps] == [s.at for s in one.steps]
    assert back.steps[0].calls == (call("tick 0", top_p=0.9),)
    assert [c.messages for c in back.steps[1].calls] == [c.messages for c in one.steps[1].calls]
    assert {s.action["actionType"] for s in back.steps} == {RESPONSE}


def test_a_trajectory_that_began_before_the_hour_of_its_first_step_stays_in_its_window() -> None:
    began = NOON - timedelta(seconds=1)
    window = window_at(began)
    for at in (NOON, None):  # a game need not write the times of steps
        one = trace(step(0, call("a"), at=at), start=began, window_id=window.id)
        (back,) = read(*write_chat(one))
        rows = trace_rows(back, minutes=60, window=None, now=NOON)
        assert rows.trajectory["windowId"] == window.id and back.start == began


def test_tool_calls_and_their_results_come_back() -> None:
    wanted = tool_call("c1", "price", "{}")
    first = call("hello", "", tool_calls=(wanted,))
    result = {"role": "tool", "tool_call_id": "c1", "content": "101.5"}
    said = {"role": "assistant", "content": None, "tool_calls": [wanted]}
    second = call("", "buy", messages=(*first.messages, said, result))
    (back,) = read(*write_chat(trace(step(0, first, second))))
    assert [one.messages for one in back.steps[0].calls] == [first.messages, second.messages]
    assert back.steps[0].calls[0].tool_calls == (wanted,)


def test_a_prompt_comes_back_with_names_parts_and_roles() -> None:
    sent = (
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "bo", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "yes?", "reasoning_content": "a greeting"},
        {"role": "user", "content": "buy"},
    )
    (back,) = read(*write_chat(trace(step(0, call("", messages=sent)))))
    assert back.steps[0].calls[0].prompt == sent


def test_lines_of_several_trajectories_may_be_mixed() -> None:
    traces = [trace(step(0, call("a")), step(1, call("b")), trajectory_id=name) for name in "xy"]
    lines = [line for one in traces for line in write_chat(one)]
    back = read(*reversed(lines))
    assert {one.trajectory_id for one in back} == {"x", "y"}
    assert [s.calls[0].messages[1]["content"] for s in back[0].steps] == ["a", "b"]


def test_evaluations_are_not_written() -> None:
    assert list(write_chat(trace(step(0, call("judge", purpose="evaluation"))))) == []


def test_replies_that_must_not_be_trained_on_are_not_written() -> None:
    forced = Tokens(policy_version=3, untrainable="prefilled")
    lines = list(write_chat(trace(step(0, call("a"), call("b"), tokens={0: forced}))))
    assert [line["messages"][1]["content"] for line in lines] == ["b"]


def test_what_is_written_is_what_fine_tuning_takes() -> None:
    (line,) = write_chat(trace(step(0, call("tick 0", "hold"))))
    assert line["messages"] == [
        {"role": "system", "content": "You trade."},
        {"role": "user", "content": "tick 0"},
        {"role": "assistant", "content": "hold"},
    ]


def test_every_reply_of_a_foreign_conversation_is_a_step_unless_its_weight_is_zero() -> None:
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "hello", "weight": 0},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "hello again"},
    ]
    first, again = read({"messages": messages}), read({"messages": messages})
    (one,) = first
    assert first == again and one.agent_id == "imported"
    (only,) = one.steps
    assert only.calls[0].response == "hello again"
    assert only.calls[0].messages == (
        message("system", "Be kind."), message("user", "hi"), message("assistant", "hello"),
        message("user", "again"),
    )  # fmt: skip


HI = {"role": "user", "content": "hi"}
HELLO = {"role": "assistant", "content": "hello"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": []}, "messages is not a non-empty list"),
        ({"messages": [HI]}, "the last message has role user"),
        ({"messages": [HELLO]}, "the first reply has no prompt"),
        ({"messages": [HI, {**HELLO, "weight": 0}]}, "and 0 replies are to be learnt"),
        ({"messages": [HI, {"role": "bot", "content": "x"}]}, "role 'bot' is not one of"),
        ({"messages": [{"role": "user", "content": None}, HELLO]}, r"messages\[0\]: content None"),
        ({"messages": [HI, {"role": "assistant", "content": None, "tool_calls": ["ls"]}]},
         r"messages\[1\]: Expected `object`"),
        ({"messages": [HI, {"role": "assistant", "content": None, "function_call": {}}]},
         r"messages\[1\]: content None"),
        ({"messages": [HI, HELLO], "metadata": {"trajectory_id": "t"}}, "missing required field"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_named(line: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportFileError, match=f"f:1: .*{message}"):
        read(line)


def test_a_written_chat_has_no_ground_truth() -> None:
    """A trace has only these fields; none is ground truth."""
    one = trace(step(0, call("tick 0")))
    assert "correctness" not in msgspec.json.encode(list(write_chat(one))).decode()
