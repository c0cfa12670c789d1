import math
from typing import Any

import msgspec
import pytest

from babylon.serving.gateway.exchange import CHAT, Exchange, Identity
from babylon.serving.gateway.route_table import ServingRoute, Target
from babylon.serving.openai_wire import RequestError, parse_chat

V3 = Target("babylon-v3", 3, "/checkpoints/3")


def exchange(**fields: Any) -> Exchange:
    fields = {"model": "babylon", "messages": [{"role": "user", "content": "hi"}], **fields}
    return Exchange(
        call_id="c1",
        identity=Identity(agent_id="a", trajectory_id=None, step=None),
        request=parse_chat(fields),
        fields=fields,
        dialect=CHAT,
        assigned=ServingRoute(7, "babylon", V3).assign("babylon", "a"),
        key_id="k",
    )


def answer(
    tokens: tuple[int, ...] = (5, 6), scores: tuple[Any, ...] = (-0.5, -1.0), counted: int = 2
) -> dict[str, Any]:
    """An engine's whole answer."""
    return {
        "choices": [
            {
                "message": {"role": "assistant", "content": "ok"},
                "token_ids": list(tokens),
                "logprobs": {"content": [{"logprob": score} for score in scores]},
                "finish_reason": "stop",
            }
        ],
        "prompt_token_ids": [1, 2, 3],
        "usage": {"completion_tokens": counted},
    }


def flaw_of(given: dict[str, Any], **fields: Any) -> str | None:
    call = exchange(**fields)
    call.note(given)
    row = call.record()
    assert row.trainable is (row.untrainable_reason is None)
    return row.untrainable_reason


def test_client_is_told_the_policy_whatever_the_engine_calls_it() -> None:
    given = exchange().note({**answer(), "model": "/checkpoints/base"})
    assert given is not None and given["model"] == "babylon-v3"


def test_sampled_answer_with_all_its_tokens_is_trainable() -> None:
    assert flaw_of(answer()) is None


@pytest.mark.parametrize(
    ("given", "fields", "reason"),
    [
        (answer(scores=(-1.0,)), {}, "2 token ids, 1 logprobs, but usage says 2 tokens"),
        (answer(tokens=(5,)), {}, "1 token ids, 2 logprobs, but usage says 2 tokens"),
        (answer(counted=3), {}, "2 token ids, 2 logprobs, but usage says 3 tokens"),
        (answer((), (), 0), {}, "no tokens"),
        (answer(scores=(-1.0, None)), {}, "a logprob is not finite"),
        (answer(scores=(-1.0, -math.inf)), {}, "a logprob is not finite"),
        (answer(scores=(-1.0, -9999.0)), {}, "a logprob is -9999, which stands for minus infinity"),
        (answer(), {"temperature": 0}, "temperature 0: greedy, not sampled"),
        (answer(), {"top_p": 0.5}, "top_p 0.5: not sampled from the whole distribution"),
        (answer(), {"top_k": 20, "min_p": 0}, "the sampling distribution was changed by top_k"),
        (answer(), {"logit_bias": {"5": 1}}, "the sampling distribution was changed by logit_bias"),
        (answer(), {"new": 1}, "unknown fields may change the sampling distribution: new"),
        (
            answer(),
            {"messages": [{"role": "user", "content": [{"type": "text"}, {"type": "image_url"}]}]},
            "the prompt holds image_url, which is not in its tokens",
        ),
    ],
)
def test_untrainable_says_why(given: dict[str, Any], fields: dict[str, Any], reason: str) -> None:
    assert flaw_of(given, **fields) == reason


def test_the_field_that_is_too_long_is_named() -> None:
    with pytest.raises(RequestError, match=r"^user 'uuu"):
        Identity.of([], "u" * 201)
    with pytest.raises(RequestError, match=r"^x-babylon-agent 'uuu"):
        Identity.of([(b"x-babylon-agent", b"u" * 201)], None)


def test_the_message_of_an_answer_is_kept_whole_or_in_pieces() -> None:
    wanted = {"id": "c1", "type": "function", "function": {"name": "price", "arguments": '{"a":1}'}}
    message = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [wanted]}
    whole = exchange()
    whole.note({"id": "x", "choices": [{"message": message, "finish_reason": "tool_calls"}]})
    pieces = exchange(stream=True)
    for delta in (
        {"role": "assistant", "content": ""},
        {"reasoning": "h"},
        {"reasoning": "m"},
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "price", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
    ):
        seen = pieces.note({"id": "x", "choices": [{"delta": delta}]})
        assert seen is not None and seen["id"] == pieces.call_id
    for one in whole, pieces:
        row = one.record()
        assert (row.response, msgspec.json.decode(row.answer or "")) == ("", message)


def test_an_answer_of_text_alone_is_stored_once() -> None:
    call = exchange()
    call.note(answer())
    assert call.record().answer is None


def test_engine_is_asked_for_the_exact_policy_with_sampling_spelled_out() -> None:
    body = msgspec.json.decode(exchange(stop=["x"], custom=1, stream=True).upstream_body())
    assert body == {
        "model": "babylon-v3",
        "messages": [{"role": "user", "content": "hi"}],
        "stop": ["x"],
        "custom": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 1.0,
        "top_p": 1.0,
        "logprobs": True,
        "return_token_ids": True,
    }


def test_interrupted_call_keeps_what_came_and_is_not_trainable() -> None:
    call = exchange()
    call.note(answer())
    row = call.record(interrupted="the client left")
    assert (row.trainable, row.untrainable_reason) == (False, "the client left")
    assert (row.finish_reason, row.completion_token_ids) == ("interrupted", [5, 6])


def test_usage_chunk_is_withheld_from_a_client_that_did_not_ask_for_it() -> None:
    chunk = {"choices": [], "usage": {"completion_tokens": 2}}
    silent, asked = (
        exchange(stream=True),
        exchange(stream=True, stream_options={"include_usage": True}),
    )
    assert silent.note(dict(chunk)) is None
    assert asked.note(dict(chunk)) == chunk
    assert silent.completion_tokens == asked.completion_tokens == 2


def test_the_tokens_of_all_prompts_and_choices_count_also_without_a_usage() -> None:
    said = exchange(n=2)
    (choice,) = answer()["choices"]
    others = [{**choice, "index": index} for index in range(2)]
    said.note({"choices": others, "prompt_token_ids": [1, 2, 3]})  # broken off
    assert said.used == (3, 4)
    said.note({"choices": [], "usage": {"prompt_tokens": 90, "completion_tokens": 5}})
    assert said.used == (90, 5)


def test_a_prompt_that_comes_with_each_choice_is_noted_once() -> None:
    call = exchange(stream=True, n=3)
    for index in range(3):
        delta = {"role": "assistant", "content": ""}
        call.note({"choices": [{"index": index, "delta": delta}], "prompt_token_ids": [1, 2]})
    assert call.record().prompt_token_ids == [1, 2]
    assert call.used == (2, 0)


def test_a_reason_that_quotes_a_field_can_be_stored() -> None:
    reason = flaw_of(answer(), **{"\0x": 1})
    assert reason is not None and "\0" not in reason


@pytest.mark.parametrize("sent", ["José".encode(), b"utf-8''Jos%C3%A9", b"UTF-8''Jos%c3%a9"])
def test_an_agents_name_comes_in_utf_8_or_in_ascii(sent: bytes) -> None:
    assert Identity.of([(b"x-babylon-agent", sent)], None).agent_id == "José"


def test_user_stands_in_for_the_agent_header() -> None:
    chat = exchange(user="from-body").request
    header = [(b"x-babylon-agent", "from-header-é".encode()), (b"x-babylon-step", b"12")]
    assert Identity.of([], chat.user).agent_id == "from-body"
    assert Identity.of(header, chat.user) == Identity(
        agent_id="from-header-é", trajectory_id=None, step=12
    )


@pytest.mark.parametrize(
    "header",
    [
        (b"x-babylon-step", b"three"),
        (b"x-babylon-step", "٣".encode()),
        (b"x-babylon-step", b"9999999999"),
        (b"x-babylon-agent", b"a\x07b"),
        (b"x-babylon-agent", "José".encode("latin-1")),
        (b"x-babylon-agent", b"utf-8''Jos%E9"),
        (b"x-babylon-trajectory", b"t" * 201),
    ],
)
def test_identity_that_cannot_be_stored_is_refused(header: tuple[bytes, bytes]) -> None:
    with pytest.raises(RequestError, match=header[0].decode()) as caught:
        Identity.of([header], None)
    assert caught.value.status == 400
