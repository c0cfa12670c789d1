"""The fields of a request that leave the sampling distribution as it is."""

import msgspec
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from babylon.serving.openai_wire import (
    MAX_DEPTH,
    RequestError,
    constraints,
    decode_batch,
    decode_object,
    error_message,
    for_engine,
    other_parts,
    parse_chat,
    unknown_fields,
)

OPENAI = {
    *chat_create_params.CompletionCreateParamsBase.__annotations__,
    *completion_create_params.CompletionCreateParamsBase.__annotations__,
    "stream",
}
# Fields of OpenAI whose effect on the tokens is not recorded, or is not known.
OPENAI_UNDECIDED = {"audio", "prediction", "web_search_options"}
# The fields of vLLM 0.32 beyond OpenAI's; tests/contract/test_vllm_fields.py compares them with it.
VLLM = """
    thinking_token_budget include_reasoning use_beam_search top_k min_p repetition_penalty
    length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
    prompt_logprobs logprob_token_ids allowed_token_ids bad_words add_generation_prompt
    continue_final_message add_special_tokens documents chat_template chat_template_kwargs
    structured_outputs priority request_id return_tokens_as_token_ids return_token_ids
    return_token_offsets return_prompt_text cache_salt vllm_xargs watermarking session_id
    stream_interval routed_experts_prompt_start
"""
VLLM_UNDECIDED = """
    media_io_kwargs mm_processor_kwargs mm_payload return_mm_kwargs kv_transfer_params
    ec_transfer_params repetition_detection prompt_embeds
"""


def test_every_field_of_openai_is_decided() -> None:
    assert set(unknown_fields(dict.fromkeys(OPENAI, 1))) == OPENAI_UNDECIDED


def test_every_field_of_vllm_is_decided() -> None:
    assert unknown_fields(dict.fromkeys(VLLM.split(), 1)) == []
    undecided = VLLM_UNDECIDED.split()
    assert unknown_fields(dict.fromkeys(undecided, 1)) == undecided


@pytest.mark.parametrize(
    "field",
    [
        {"thinking_token_budget": 64},
        {"vllm_xargs": {"processor": "x"}},
        {"use_beam_search": True},
        {"watermarking": True},
        {"ignore_eos": True},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "price"}}},
        {"response_format": {"type": "json_object"}},
        {"top_k": 5},
        {"modalities": ["text", "audio"]},
    ],
)
def test_what_bends_the_distribution_is_named(field: dict[str, object]) -> None:
    assert constraints(field) == list(field)


def test_neutral_and_absent_values_bend_nothing() -> None:
    neutral = {"top_k": -1, "min_p": 0, "tool_choice": "auto", "logit_bias": {}, "foo": None}
    neutral |= {"use_beam_search": False, "response_format": {"type": "text"}, "best_of": None}
    neutral["modalities"] = ["text"]
    assert constraints(neutral) == unknown_fields(neutral) == []


def test_strict_is_left_out_of_tools_that_need_not_be_called() -> None:
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    loose = {"type": "function", "function": {"name": "f"}}
    tools: list[object] = [strict, loose, "odd", {"function": 1}]
    for choice in ({}, {"tool_choice": None}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        asked: dict[str, object] = {"tools": tools, **choice}
        left = for_engine(asked)
        assert left["tools"] == [loose, loose, "odd", {"function": 1}]
        assert strict in tools  # what the client sent is recorded
    forced: list[dict[str, object]] = [
        {},
        {"tools": None},
        {"tools": [loose]},
        {"tools": [strict], "tool_choice": "required"},
        {"tools": [strict], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ]
    for same in forced:
        assert for_engine(same) is same


def test_the_role_developer_reaches_engines_as_system() -> None:
    """Qwen3's template leaves it out without a word, and newer ones refuse it."""
    asked = {"messages": [{"role": "developer", "content": "a"}, {"role": "user"}, "odd"]}
    left = for_engine(asked)
    assert left["messages"] == [{"role": "system", "content": "a"}, {"role": "user"}, "odd"]
    assert asked["messages"][0] == {"role": "developer", "content": "a"}  # as the client sent it


def test_what_is_said_of_a_part_tells_no_secret() -> None:
    parts = ["4111 1111", {"type": "4111 1111"}, {"type": ["4111"]}, {"type": "image_url"}, 4111]
    found = other_parts({"messages": [{"role": "user", "content": parts}]})
    assert found == ["a part of unknown type", "image_url"]


def test_half_a_surrogate_pair_costs_no_batch() -> None:
    body = rb'["a\ud83d","\ud83d\ude00","\uDE00\ud83d","\\ud83d","\\\ud83d",{"\ud83d":"\n"}]'
    assert decode_batch(body) == [
        "a\ufffd",
        "\U0001f600",
        "\ufffd\ufffd",
        "\\ud83d",
        "\\\ufffd",
        {"\ufffd": "\n"},
    ]
    with pytest.raises(msgspec.DecodeError):
        decode_batch(rb'["\ud83d",')


def test_half_a_surrogate_pair_costs_no_call() -> None:
    body = rb'{"messages":[{"role":"user","content":"cut \ud83d"}]}'
    assert decode_object(body) == {"messages": [{"role": "user", "content": "cut \ufffd"}]}
    with pytest.raises(RequestError, match="not a JSON object") as caught:
        decode_object(rb'["\ud83d"]')
    assert caught.value.status == 400


@pytest.mark.parametrize("messages", [["x"], "x", {"content": 1}, [{"content": 1}], None])
def test_a_field_that_a_completion_does_not_have_may_hold_anything(messages: object) -> None:
    assert other_parts({"prompt": "x", "messages": messages}) == []


def test_a_body_is_refused_at_one_depth_whatever_comes_later() -> None:
    def body(depth: int) -> bytes:
        return b'{"x":' + b"[" * depth + b"]" * depth + b"}"

    assert decode_object(body(MAX_DEPTH))
    for depth in MAX_DEPTH + 1, 985, 2000:
        with pytest.raises(RequestError) as caught:
            decode_object(body(depth))
        assert caught.value.status == 400
    wide = b'{"x":[' + b"[]," * 2000 + b"[]]}"
    assert len(decode_object(wide)["x"]) == 2001


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no room"}}', "no room"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"error": {"message": "\xff"}}', '{"error": {"message": "\ufffd"}}'),
        (b"[" * 100_000, "[" * 500),
        (b"<html>", "<html>"),
    ],
)
def test_any_error_response_has_a_message(body: bytes, message: str) -> None:
    assert error_message(body) == message


def constrained(schema: object, *, tool: bool) -> dict[str, object]:
    chat: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
    function = {"type": "function", "function": {"name": "f", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    more = {"tools": [function], "tool_choice": "required"} if tool else {"response_format": form}
    return chat | more


@pytest.mark.parametrize("tool", [True, False])
def test_a_schema_whose_grammar_would_take_all_memory_is_refused(tool: bool) -> None:
    """``{"multipleOf": 999983}`` kept the engine busy for a minute, and larger ones for ever.
    A client that left did not stop it, and six such calls stopped all others."""
    together = {"allOf": [{"multipleOf": 317}, {"properties": {"x": {"multipleOf": 313.0}}}]}
    for schema in ({"multipleOf": 1_000_000_007}, {"multipleOf": 12.3457}, together):
        with pytest.raises(RequestError, match="common multiple of at most 10000") as caught:
            parse_chat(constrained({"type": "number", **schema}, tool=tool))
        assert caught.value.status == 400
    usual = [{"multipleOf": one} for one in (5, 0.01, 1_000_000, 0.25, 12, "x", -2, 0, True)]
    parse_chat(constrained({"anyOf": usual}, tool=tool))
    free = constrained({"multipleOf": 1_000_000_007}, tool=True) | {"tool_choice": "auto"}
    parse_chat(free)  # no grammar is made
