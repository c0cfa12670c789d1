"""Tool calls in text, whole and in pieces."""

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from babylon.serving.engine.choice import ChatChoice, Piece
from babylon.serving.engine.tool_calls import ToolCallParser, template_message
from babylon.serving.openai_wire import RequestError, parse_chat

CALL = '<tool_call>\n{"name": "price", "arguments": {"ticker": "é"}}\n</tool_call>'
ANSWERS = [
    ("hello", "hello", 0),
    ("a < b <tool", "a < b <tool", 0),
    (CALL, "", 1),
    (f"Let me look. {CALL}\n{CALL}", "Let me look.", 2),
    (f"{CALL} and now?", "and now?", 1),
    ("<tool_call>{nonsense}</tool_call>!", "<tool_call>{nonsense}</tool_call>!", 0),
    (f"{CALL}<tool_call>{{", "<tool_call>{", 1),
    ('<tool_call>{"name": "now"}</tool_call>', "", 1),
    ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', 0),
]


def parsed(parser: ToolCallParser, *pieces: str) -> tuple[str, list[Any]]:
    text, calls = "", []
    for number, piece in enumerate(pieces, start=1):
        plain, found = parser.push(piece, last=number == len(pieces))
        text += plain
        calls += found
    return text, calls


@pytest.mark.parametrize(("answer", "text", "count"), ANSWERS)
def test_calls_are_separated_from_the_text_wherever_it_is_cut(
    answer: str, text: str, count: int
) -> None:
    whole, calls = parsed(ToolCallParser(), answer)
    assert (whole, len(calls)) == (text, count)
    assert len({call["id"] for call in calls}) == count
    for size in range(1, len(answer)):
        pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
        again, found = parsed(ToolCallParser(), *pieces)
        assert (again, [call["function"] for call in found]) == (
            text,
            [call["function"] for call in calls],
        )


def test_a_calls_arguments_are_a_json_string() -> None:
    _, (call,) = parsed(ToolCallParser(), CALL)
    assert call["function"]["name"] == "price" and call["type"] == "function"
    assert json.loads(call["function"]["arguments"]) == {"ticker": "é"}


def test_only_as_many_calls_as_asked_for() -> None:
    assert len(parsed(ToolCallParser(most=1), CALL + CALL)[1]) == 1


def test_templates_get_arguments_as_objects_and_text_instead_of_null() -> None:
    called = {"id": "c", "type": "function", "function": {"name": "price", "arguments": '{"a":1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [called], "refusal": None}
    assert template_message(message) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "price", "arguments": {"a": 1}}}],
    }
    result = {"role": "tool", "content": [{"type": "text", "text": "7"}], "tool_call_id": "c"}
    assert template_message(result) == {"role": "tool", "content": "7", "tool_call_id": "c"}


@pytest.mark.parametrize(
    "calls",
    [
        ["x"],
        [{}],
        [{"function": {"name": "f"}}],
        [{"function": {"name": "f", "arguments": "["}}],
        [{"function": {"name": "f", "arguments": '{"a":' * 2000 + "1" + "}" * 2000}}],
    ],
)
def test_a_malformed_call_in_the_history_is_refused(calls: list[Any]) -> None:
    with pytest.raises(RequestError, match="send a function with a name and JSON arguments"):
        template_message({"role": "assistant", "content": None, "tool_calls": calls})


@pytest.mark.parametrize("calls", [7, "x", {"id": "c"}])
def test_calls_in_the_history_are_a_list(calls: object) -> None:
    with pytest.raises(RequestError, match="send a list"):
        template_message({"role": "assistant", "content": None, "tool_calls": calls})


class _SaidAtOnce(ChatChoice):
    async def _pieces(self) -> AsyncIterator[Piece]:
        self.finish_reason = "stop"
        yield Piece(f"Let me look. {CALL}", [5], [-0.5], [])


async def test_a_streamed_delta_has_text_or_calls() -> None:
    tools = [{"type": "function", "function": {"name": "price"}}]
    fields = {"model": "p", "messages": [{"role": "user"}], "return_token_ids": True}
    asked = parse_chat({**fields, "tools": tools})
    policy = cast(Any, SimpleNamespace(decode=None))
    job = cast(Any, SimpleNamespace(row=SimpleNamespace(request=SimpleNamespace(constraint=None))))
    text, call = [part async for part in _SaidAtOnce(policy, asked, job, 0).parts()]
    assert text["delta"] == {"content": "Let me look."} and text["finish_reason"] is None
    assert [*call["delta"]] == ["tool_calls"] and call["finish_reason"] == "tool_calls"
    assert "token_ids" not in text and call["token_ids"] == [5]
