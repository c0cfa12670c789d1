"""Requests of Responses and Messages as chat requests."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babylon.serving.gateway.dialects import converted, messages_request, responses_request
from babylon.serving.openai_wire import RequestError, parse_chat, unknown_fields

SCHEMA = {"type": "object", "properties": {"ticker": {"type": "string"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "price", "arguments": '{"t":1}'}}
THOUGHT = {"reasoning": "Hm.", "reasoning_content": "Hm."}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
FUNCTION = {"name": "price", "description": "d", "parameters": SCHEMA, "strict": True}
NAMED = {"type": "function", "function": {"name": "price"}}
_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "name", "input", "call_id"]),
            inner | st.sampled_from(["user", "assistant", "message", "function_call", "text"]),
            max_size=4,
        )
    ),
    max_leaves=8,
)


def from_responses(**fields: Any) -> dict[str, Any]:
    return responses_request.chat_request({"model": "babylon", **fields})


def from_messages(*turns: Any, **fields: Any) -> dict[str, Any]:
    asked = {"model": "babylon", "max_tokens": 9, "messages": [*turns], **fields}
    return messages_request.chat_request(asked)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_a_turn_of_response_items_is_one_message() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        user([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]),
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c1", "name": "price", "arguments": '{"t":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "12"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        user([{"type": "input_image", "image_url": IMAGE["image_url"]["url"]}]),  # type: ignore[index]
    ]
    assert from_responses(instructions="Trade.", input=items)["messages"] == [
        {"role": "system", "content": "Trade.\n\nBe brief."},  # templates take one
        user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        {"role": "assistant", "content": "x", "tool_calls": [CALL], **THOUGHT},
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        user([IMAGE]),
    ]


def test_a_billing_line_that_changes_with_each_request_is_no_instruction() -> None:
    """Claude Code's: no call would continue a session, and the policy would learn a random word."""
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.36; cch=a1b2c;"},
        {"type": "text", "text": "Trade."},
    ]
    turns = [user("hi"), {"role": "system", "content": "Be brief."}]
    asked = from_messages(*turns, system=blocks)["messages"]
    assert asked == [
        {"role": "system", "content": "Trade."},
        user("hi"),
        {"role": "system", "content": "Be brief."},
    ]
    assert from_messages(user("hi"), system=blocks[:1])["messages"] == [user("hi")]


def test_instructions_in_parts_are_one_message() -> None:
    part = {"type": "input_text", "text": "b"}
    items = [{"role": "developer", "content": [part, part]}, user("hi")]
    first, _ = from_responses(instructions="a", input=items)["messages"]
    assert [one["text"] for one in first["content"]] == ["a", "b", "b"]


def test_texts_of_one_turn_are_one_message_and_those_of_two_turns_are_two() -> None:
    def turn(*blocks: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": [*blocks]}

    x, y = ({"type": "text", "text": text} for text in "xy")
    use = {"type": "tool_use", "id": "c1", "name": "price", "input": {"t": 1}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    turns = [turn(x, y), turn(x, y, use, y), turn(x, thought, y, x), user("go")]
    assert from_messages(*turns)["messages"] == [
        {"role": "assistant", "content": "xy"},
        {"role": "assistant", "content": "xyy", "tool_calls": [CALL]},
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "yx", **THOUGHT},
        user("go"),
    ]


def test_parts_of_a_message_are_joined_once_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[int] = []
    join = converted._instructions

    def noted(contents: Any) -> Any:
        given.append(len(contents))
        return join(contents)

    monkeypatch.setattr(converted, "_instructions", noted)
    part = {"type": "input_text", "text": "b"}
    system = [{"role": "system", "content": content} for content in ("a", "a", [part, part]) * 50]
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    said = [{"role": "assistant", "content": "x"}] * 100
    first, second = from_responses(input=[*system, call, *said])["messages"]
    assert given == [150]
    assert [one["text"] for one in first["content"]][:4] == ["a\n\na", "b", "b", "a"]
    assert len(first["content"]) == 1 + 2 * 50 + 2 * 49
    assert second["content"] == "x" * 100 and len(second["tool_calls"]) == 1


def test_empty_texts_of_the_assistant_are_a_text_and_no_text_is_none() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    empty = {"role": "assistant", "content": ""}
    (message,) = from_responses(input=[empty, empty, call])["messages"]
    assert message["content"] == ""
    (message,) = from_responses(input=[empty, {**empty, "content": "x"}])["messages"]
    assert message["content"] == "x"
    (message,) = from_responses(input=[call])["messages"]
    assert message["content"] is None


def test_fields_of_harnesses_that_have_no_effect_leave_calls_trainable() -> None:
    codex = from_responses(input="x", client_metadata={"a": "b"}, context_management=[{"a": 1}])
    claude = from_messages(user("x"), diagnostics={"previous_message_id": None}, speed="standard")
    assert unknown_fields(codex) == unknown_fields(claude) == []


def test_a_turn_of_content_blocks_is_one_message_and_results_come_first() -> None:
    said = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}},
        {"type": "tool_use", "id": "c1", "name": "price", "input": {"t": 1}},
    ]
    picture = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    heard = [
        {"type": "text", "text": "and"},
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "12"}]},
        {"type": "image", "source": picture},
    ]
    turns = [user("go"), {"role": "assistant", "content": said}, user(heard)]
    assert from_messages(*turns, system=[{"type": "text", "text": "Trade."}])["messages"] == [
        {"role": "system", "content": "Trade."},
        user("go"),
        {"role": "assistant", "content": "x", "tool_calls": [CALL], **THOUGHT},
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
        user([{"type": "text", "text": "and"}, IMAGE]),
    ]


@pytest.mark.parametrize(
    ("sent", "chat"),
    [
        ({"max_output_tokens": 5}, {"max_completion_tokens": 5}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"text": {"format": {"type": "text"}}}, {"response_format": {"type": "text"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": SCHEMA},
                }
            },
        ),
        ({"tools": [{"type": "function", **FUNCTION}]},
         {"tools": [{"type": "function", "function": FUNCTION}]}),
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "function", "name": "price"}}, {"tool_choice": NAMED}),
        ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"store": True, "truncation": "auto", "include": ["reasoning.encrypted_content"]}, {}),
        ({"user": "a", "top_k": 3}, {"user": "a", "top_k": 3}),
    ],
)  # fmt: skip
def test_fields_of_responses(sent: dict[str, Any], chat: dict[str, Any]) -> None:
    plain = {"model": "babylon", "messages": [user("hi")]}
    translated = from_responses(input="hi", **sent)
    assert translated == plain | chat
    parse_chat(translated)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_free_choice_among_no_tools_is_left_out(choice: str) -> None:
    """vLLM refuses it: "When using `tool_choice`, `tools` must be set"."""
    assert "tool_choice" not in from_responses(input="hi", tools=[], tool_choice=choice)
    tools = [{"type": "function", **FUNCTION}]
    assert from_responses(input="hi", tools=tools, tool_choice=choice)["tool_choice"] == choice


def test_a_turn_that_is_only_a_thought_has_an_empty_text() -> None:
    """It was cut at its limit. Templates put the content behind other text, and refuse a null."""
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    turns = [user("a"), {"role": "assistant", "content": [thought]}, user("b")]
    item = {"type": "reasoning", "id": "r", "summary": [], "content": [{"text": "Hm."}]}
    for chat in (from_messages(*turns), from_responses(input=[user("a"), item, user("b")])):
        assert chat["messages"][1] == {"role": "assistant", "content": "", **THOUGHT}


@pytest.mark.parametrize(
    ("sent", "chat"),
    [
        ({"stop_sequences": ["x"]}, {"stop": ["x"]}),
        ({"metadata": {"user_id": "a"}}, {"user": "a"}),
        ({"tools": [{"name": "price", "input_schema": SCHEMA, "cache_control": {}}]},
         {"tools": [{"type": "function", "function": {"name": "price", "parameters": SCHEMA}}]}),
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
         {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"tool_choice": {"type": "tool", "name": "price"}}, {"tool_choice": NAMED}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}},
         {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
         {"response_format": {"type": "json_schema",
                              "json_schema": {"name": "answer", "schema": SCHEMA}}}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"service_tier": "auto"}, {}),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, {}),
        ({"temperature": 0.5, "top_k": 3}, {"temperature": 0.5, "top_k": 3}),
    ],
)  # fmt: skip
def test_fields_of_messages(sent: dict[str, Any], chat: dict[str, Any]) -> None:
    plain = {"model": "babylon", "max_tokens": 9, "messages": [user("hi")]}
    translated = from_messages(user("hi"), **sent)
    assert translated == plain | chat
    parse_chat(translated)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ({"input": "a", "previous_response_id": "r"}, "send the conversation so far in input"),
        ({"input": "a", "conversation": "c"}, "send the conversation so far in input"),
        ({"input": "a", "n": 2}, "send one request per answer"),
        ({"input": "a", "background": True}, "wait for the answer or stream it"),
        ({"input": [{"type": "item_reference", "id": "r"}]}, "input item of type 'item_reference'"),
        ({"input": [7]}, r"Expected `object`, got `int` - at `\$\.input\[0\]`"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "missing required field `call_id`"),
        (
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            "gateways keep no items; send the item itself",
        ),
        (
            {"input": "a", "tools": [{"type": "web_search"}]},
            "tool of type 'web_search': gateways run no tools of OpenAI",
        ),
        ({"input": "a", "tool_choice": {"type": "mcp"}}, "tool_choice of type 'mcp': use function"),
        ({}, "missing required field `input`"),
    ],
)
def test_refused_responses_state_the_remedy(sent: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as refused:
        from_responses(**sent)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("turn", "sent", "reason"),
    [
        (user([{"type": "document"}]), {}, "content of type 'document': use text, image"),
        (user([{"type": "tool_result"}]), {}, "missing required field `tool_use_id`"),
        ({"role": "assistant", "content": "I"}, {}, "prefill"),
        (user("a"), {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "use custom"),
        (user("a"), {"mcp_servers": [{"url": "x"}]}, "give its tools in tools"),
        (user("a"), {"tool_choice": {"type": "tool"}}, "Expected `str`, got `null`"),
    ],
)
def test_refused_messages_state_the_remedy(turn: Any, sent: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as refused:
        from_messages(turn, **sent)
    assert refused.value.status == 400


@given(st.dictionaries(st.sampled_from(["input", "instructions", "tools", "text", "tool_choice",
                                        "messages", "system", "thinking", "output_config"]),
                       _anything))  # fmt: skip
def test_any_json_is_translated_or_refused(fields: dict[str, Any]) -> None:
    for translate in (responses_request.chat_request, messages_request.chat_request):
        for given_fields in (fields, {"input": "a", "messages": [user("a")], **fields}):
            try:
                translate(given_fields)
            except RequestError as error:
                assert error.status == 400
