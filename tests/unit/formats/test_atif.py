"""ATIF (Harbor RFC 0001 v1.7), written and read."""

import json
from typing import Any

import jsonschema
import msgspec
import pytest

from babylon.core.llm_calls import LlmCall, Message
from babylon.formats.atif import read_atif, write_atif
from babylon.formats.trace import ImportFileError, Tokens, Trace
from babylon.formats.trace_rows import trace_rows, training_rows_of
from tests.conftest import CAPTURED
from tests.unit.formats.traces import (
    NOON,
    SYSTEM,
    call,
    document,
    message,
    step,
    tokens,
    tool_call,
    trace,
    without_place,
)


def read(value: Any) -> Trace:
    (one,) = read_atif(document(value))
    return without_place(one)


def atif(*steps: dict[str, Any], **changes: Any) -> dict[str, Any]:
    numbered = [{"step_id": i + 1, **fields} for i, fields in enumerate(steps)]
    return {
        "schema_version": "ATIF-v1.7",
        "agent": {"name": "terminus", "version": "2.0", "model_name": "qwen"},
        "steps": numbered,
        **changes,
    }


USER = {"source": "user", "message": "Sort the file."}


def test_a_trajectory_comes_back_as_it_was() -> None:
    one = trace(
        step(0, call("tick 0"), tokens={0: tokens(seed=7, finish_reason="length")}),
        step(1, call("think", purpose="reasoning"), call("tick 1", reasoning="cheap")),
        step(2),
        step(3, call("tick 3", latency_ms=12, action_type="HOLD"), reward=-1.0),
    )
    assert read(write_atif(one)) == msgspec.structs.replace(
        one,
        steps=(
            step(0, call("tick 0", prompt_tokens=3, completion_tokens=2),
                 tokens=one.steps[0].tokens),
            *one.steps[1:],
        ),
    )  # fmt: skip


def test_a_conversation_that_goes_on_is_written_once() -> None:
    first = call("hello", "hi")
    second = call("", "fine", messages=(*first.messages, message("assistant", "hi"),
                                        message("user", "how are you?")))  # fmt: skip
    written = write_atif(trace(step(0, first), step(1, second)))
    assert [s["message"] for s in written["steps"]] == [
        "You trade.", "hello", "hi", "how are you?", "fine"
    ]  # fmt: skip
    assert read(written).steps[1].calls[0].messages == second.messages


def test_empty_messages_and_prompts_come_back() -> None:
    asked = (SYSTEM, message("user", ""))
    first = call("", "", messages=asked, reasoning="quiet")
    second = call("", "", messages=(*asked, message("assistant", ""), message("user", "v")))
    nothing = LlmCall(
        system_prompt="", user_prompt="", response="x", temperature=1, purpose="action"
    )
    one = trace(*[step(i, said) for i, said in enumerate((first, second, nothing, nothing))])
    back = read(write_atif(one))
    assert [s.calls[0].prompt for s in back.steps] == [s.calls[0].prompt for s in one.steps]
    assert back.steps[2].calls[0].messages is None
    with pytest.raises(ImportFileError, match="a reply without a prompt"):
        read(atif(REPLY))


def test_replies_inside_a_prompt_are_context_and_not_calls() -> None:
    prompt = (SYSTEM, message("user", "a"), message("assistant", "b"), message("tool", "c"))
    written = write_atif(trace(step(0, call("", "d", messages=prompt))))
    sources = [(s["source"], s.get("is_copied_context"), s.get("llm_call_count"))
               for s in written["steps"]]  # fmt: skip
    assert sources == [
        ("system", None, None), ("user", None, None), ("agent", True, 0), ("user", None, None),
        ("agent", None, 1),
    ]  # fmt: skip
    (one,) = read(written).steps
    assert one.calls[0].messages == prompt


def test_what_is_written_follows_the_rfc() -> None:
    written = write_atif(trace(step(0, call("tick 0"), tokens={0: tokens()}), step(1)))
    assert written["schema_version"] == "ATIF-v1.7"
    assert written["agent"].keys() >= {"name", "version"}
    assert [s["step_id"] for s in written["steps"]] == [1, 2, 3, 4]
    for one in written["steps"]:
        assert one["source"] in ("system", "user", "agent") and isinstance(one["message"], str)
        if one["source"] != "agent":
            assert not one.keys() & {"metrics", "model_name", "reasoning_content", "tool_calls"}
        if one.get("llm_call_count") == 0:
            assert "metrics" not in one
    assert written["steps"][2]["metrics"]["logprobs"] == (-0.5, -0.25)


def test_what_is_written_fits_harbor_s_own_schema() -> None:
    """``atif-v1.7.schema.json`` is ``Trajectory.model_json_schema()`` of harbor 0.25 (Apache-2.0).

    ``make test-exports`` validates with the models themselves.
    """
    schema = json.loads((CAPTURED.parent / "atif-v1.7.schema.json").read_text())
    tools = call("tick 1", "", tool_calls=[tool_call("c1", "quote", "{}")])
    one = trace(step(0, call("tick 0"), tokens={0: tokens()}), step(1, tools), step(2))
    written = json.loads(msgspec.json.encode(write_atif(one)))
    jsonschema.validate(written, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**written, "schema_version": "ATIF-v9"}, schema)


def test_every_reply_of_a_foreign_conversation_is_a_step_with_all_that_stands_before_it() -> None:
    one = read(
        atif(
            {"source": "system", "message": "Be brief."},
            USER,
            {"source": "agent", "message": "ls?", "observation": {"results": [{"content": "a b"}]}},
            {"source": "agent", "message": [{"type": "text", "text": "done"}],
             "timestamp": "2025-11-14T12:00:01Z"},
            trajectory_id="job-1",
        )
    )  # fmt: skip
    assert (one.trajectory_id, one.agent_id) == ("job-1", "terminus")
    first, second = (s.calls[0] for s in one.steps)
    assert (first.response, first.model, len(first.messages)) == ("ls?", "qwen", 2)
    assert second.messages[2:] == (
        Message(role="assistant", content="ls?"), Message(role="user", content="a b")
    )  # fmt: skip
    assert one.steps[0].at is None and one.steps[1].at is not None


def test_ids_without_a_policy_version_are_not_the_tokens_of_a_policy() -> None:
    metrics = {"prompt_token_ids": [1], "completion_token_ids": [2], "logprobs": [-1.0]}
    foreign = {"source": "agent", "message": "ok", "metrics": metrics}
    assert read(atif(USER, foreign)).steps[0].tokens == {}
    ours = {**metrics, "extra": {"babylon": {"policy_version": 4}}}
    known = read(atif(USER, {**foreign, "metrics": ours})).steps[0].tokens[0]
    assert known.policy_version == 4


def test_tool_calls_and_their_results_come_from_their_own_fields() -> None:
    called = {"source": "agent", "message": "", "tool_calls": [
        {"tool_call_id": "c1", "function_name": "sh", "arguments": {"a": 1}}]}  # fmt: skip
    (without,) = read(atif(USER, called)).steps
    wanted = tool_call("c1", "sh", '{"a":1}')
    assert (without.calls[0].tool_calls, without.tokens) == ((wanted,), {})
    metrics = {"prompt_token_ids": [1], "completion_token_ids": [2], "logprobs": [-1.0],
               "extra": {"babylon": {"policy_version": 4}}}  # fmt: skip
    answered = {"results": [{"source_call_id": "c1", "content": "x"}]}
    one = read(
        atif(
            USER,
            {**called, "metrics": metrics, "observation": answered},
            {"source": "agent", "message": "done", "metrics": metrics},
        )
    )
    assert one.steps[0].tokens and one.steps[0].calls[0].tool_calls == (wanted,)
    assert one.steps[1].calls[0].messages[-2:] == (
        {"role": "assistant", "content": None, "tool_calls": [wanted]},
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
    )


def test_a_conversation_with_tools_comes_back_and_is_written_once() -> None:
    wanted = tool_call("c1", "price", '{"ticker": "NVDA"}')  # not as we would write it
    first = call("hello", "", tool_calls=(wanted,))
    answered = {"role": "tool", "tool_call_id": "c1", "content": "101.5"}
    odd = {"role": "user", "content": [{"type": "text", "text": "and?"}], "name": "bob"}
    said = {"role": "assistant", "content": None, "tool_calls": [wanted]}
    second = call("", "buy", messages=(*first.messages, said, answered, odd))
    one = trace(step(0, first, tokens={0: tokens(tools=({"type": "function"},))}), step(1, second))
    written = write_atif(one)
    assert [s["message"] for s in written["steps"]] == ["You trade.", "hello", "", "and?", "buy"]
    assert written["steps"][2]["tool_calls"] == [
        {"tool_call_id": "c1", "function_name": "price", "arguments": {"ticker": "NVDA"}}
    ]
    assert written["steps"][2]["observation"]["results"][0]["content"] == "101.5"
    back = read(written)
    assert [s.calls[0].messages for s in back.steps] == [first.messages, second.messages]
    assert [s.calls[0].tool_calls for s in back.steps] == [(wanted,), None]
    assert back.steps[0].tokens == one.steps[0].tokens


@pytest.mark.parametrize(
    ("asked", "arguments"),
    [
        ({"function": {"name": "f", "arguments": {"a": 1}}}, {"a": 1}),  # as Ollama writes them
        ({"function": {"name": "f", "arguments": '{"a":' * 2000 + "1" + "}" * 2000}}, {}),
        ({"function": "f"}, {}),
        ("f", None),
    ],
)
def test_tool_calls_that_are_not_openai_s_come_back(asked: Any, arguments: Any) -> None:
    said = {"role": "assistant", "content": "so", "tool_calls": [asked]}
    one = trace(step(0, call("", messages=(message("user", "hi"), said))))
    written = write_atif(one)
    shown = written["steps"][1].get("tool_calls")
    assert (shown and shown[0]["arguments"]) == arguments
    assert read(written).steps[0].calls[0].prompt == one.steps[0].calls[0].prompt


def test_a_conversation_that_begins_with_a_tool_s_result_keeps_it() -> None:
    first = call("hello", "", tool_calls=(tool_call("c1", "price", "{}"),))
    answered = {"role": "tool", "tool_call_id": "c1", "content": "101.5"}
    second = call("", "buy", messages=(answered, message("user", "and?")))
    back = read(write_atif(trace(step(0, first), step(1, second))))
    assert back.steps[1].calls[0].messages == second.messages


def test_a_result_that_names_no_call_is_the_environment_s_text() -> None:
    called = {"tool_call_id": "c1", "function_name": "sh", "arguments": {}}
    asked = {"source": "agent", "message": "", "tool_calls": [called],
             "observation": {"results": [{"content": "it rains"}]}}  # fmt: skip
    one = read(atif(USER, asked, REPLY))
    assert one.steps[1].calls[0].messages[-1] == message("user", "it rains")


def test_a_reply_that_must_not_be_trained_on_stays_one() -> None:
    forced = Tokens(policy_version=3, untrainable="prefilled")
    one = trace(step(0, call("tick 0"), call("tick 1", prompt_tokens=3), tokens={0: forced}))
    back = read(write_atif(one))
    assert back == one
    rows = trace_rows(back, minutes=60, window=None, now=NOON)
    (record,) = rows.calls
    assert (record.trainable, record.untrainable_reason) == (False, "prefilled")
    (row,) = training_rows_of([back])
    assert [one.untrainable for one in row.calls] == ["prefilled", None]


def test_subagents_are_trajectories_of_their_own() -> None:
    """Their ids are unique in their document only: every parent may have a subagent ``b``."""
    inner = atif(USER, {"source": "agent", "message": "inner"}, trajectory_id="b")
    told = []
    for name in ("a", "c"):
        outer = atif(USER, {"source": "agent", "message": "outer"}, trajectory_id=name,
                     subagent_trajectories=[inner])  # fmt: skip
        told += [one.trajectory_id for one in read_atif(document(outer))]
    assert told == ["a", "a:b", "c", "c:b"]


def test_a_trajectory_without_an_id_gets_one_from_its_content() -> None:
    steps = (USER, {"source": "agent", "message": "ok"})
    first, again, other = read(atif(*steps)), read(atif(*steps)), read(atif(*steps, notes="x"))
    assert first.trajectory_id == again.trajectory_id != other.trajectory_id


REPLY = {"source": "agent", "message": "ok"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (atif(USER, REPLY, schema_version="ATIF-v2.0"), "schema_version 'ATIF-v2.0' is not"),
        (atif(USER), "no agent step"),
        (atif(REPLY), r"steps\[0\]: a reply without a prompt"),
        (atif(USER, {**REPLY, "step_id": 7}), r"steps\[1\]: step_id is 7, expected 2"),
        (atif(USER, {**REPLY, "source": "robot"}), r"Invalid enum value 'robot' .*steps\[1\]"),
        (atif(USER, {"source": "agent"}), r"missing required field `message` .*steps\[1\]"),
        (atif({**USER, "message": [{"type": "image"}]}, REPLY), "part of type 'image' is not text"),
        (
            atif(USER, {**REPLY, "metrics": {"prompt_token_ids": [1], "logprobs": [-1.0, -2.0],
                 "completion_token_ids": [2], "extra": {"babylon": {"policy_version": 1}}}}),
            "1 completion tokens and 2 logprobs",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportFileError, match=f"f:1: .*{message}"):
        read(value)
