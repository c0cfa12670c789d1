"""Messages as columns: every message comes back as it was sent."""

import pyarrow as pa
import pytest

from babylon.core.trajectories import Call
from babylon.dataset.messages import call_column, call_of, message_column, message_of
from babylon.dataset.schema import MESSAGE
from babylon.dataset.scrub import cleaned

CALL = {"id": "1", "type": "function", "function": {"name": "buy", "arguments": '{"n":1}'}}


@pytest.mark.parametrize(
    ("message", "is_raw"),
    [
        ({"role": "user", "content": "hello"}, False),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, False),
        ({"role": "tool", "content": "ok", "tool_call_id": "1"}, False),
        ({"role": "assistant", "content": "ok", "reasoning": "because"}, False),
        ({"role": "user", "content": [{"type": "text", "text": "a"}]}, True),
        ({"role": "user", "content": "x", "name": "bob"}, True),
        ({"role": 5, "content": "x"}, True),  # the game's log may hold anything
        ({"role": "assistant", "tool_calls": [CALL]}, True),  # without the key content
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, True),
        ({"role": "assistant", "content": "x", "tool_calls": None}, True),
    ],
)
def test_a_message_comes_back_as_it_was(message: dict[str, object], is_raw: bool) -> None:
    column = message_column(message)
    assert message_of(column) == message
    assert bool(column.get("raw_json")) == is_raw
    assert pa.array([column], MESSAGE).to_pylist()[0]["content"] == column["content"]


def test_a_call_comes_back_as_it_was() -> None:
    call = Call(
        step=3, messages=({"role": "user", "content": "hello"},), response="", temperature=0.7,
        top_p=0.9, policy_version=4, prompt_token_ids=(1, 2), completion_token_ids=(3, 4),
        logprobs=(-0.5, -0.25), tools=({"type": "function"},), tool_calls=(CALL,),
        reasoning="because",
    )  # fmt: skip
    assert call_of(call_column(call)) == call
    text = Call(step=0, messages=(), response="hi", untrainable="prefilled")
    assert call_of(call_column(text)) == text


def test_a_call_of_which_scrubbing_left_a_name_only_is_read_without_that_part() -> None:
    """Scrubbing replaces a whole document if two of its texts tell a secret together."""
    secret = {"password": "correcthorse"}
    call = Call(
        step=0,
        messages=({"role": "user", "content": "pay", "data": secret},),
        response="done",
        tools=({"type": "function", "function": {"name": "pay", "default": secret}},),
        tool_calls=({"id": "1", "function": {"name": "pay", "arguments": secret}},),
    )
    found = call_of(cleaned(call_column(call)))
    assert "correcthorse" not in str(found)
    assert found.messages == ({"role": "user", "content": "pay"},) and found.response == "done"
    assert found.tools == () and found.tool_calls == ()
