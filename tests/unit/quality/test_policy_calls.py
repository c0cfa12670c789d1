"""The calls that are trained, and their tokens from the gateway."""

from dataclasses import replace
from datetime import UTC, datetime
from itertools import count

import msgspec
import pytest

from babylon.core.llm_calls import Message
from babylon.quality.decode import MAX_DEPTH, GameStep
from babylon.quality.row_checks import policy_calls
from babylon.store.calls import RecordedCall
from tests.unit.quality.rows import call, compact, step

PROMPT = (Message(role="system", content="You trade."), Message(role="user", content="Trade?"))


_IDS = count()
CALLED = {"id": "x", "type": "function", "function": {"name": "price", "arguments": "{}"}}


def played(*steps):
    return msgspec.convert(list(steps), tuple[GameStep, ...])


def recorded(response="HOLD", number=0, messages=PROMPT, **changes):
    given = {
        "call_id": f"c{next(_IDS)}",
        "agent_id": "agent-1",
        "trajectory_id": "t1",
        "step_number": number,
        "route_version": 1,
        "model": "babylon-v3",
        "messages": msgspec.json.encode(messages).decode(),
        "response": response,
        "temperature": 0.9,
        "top_p": 0.95,
        "policy_version": 3,
        "prompt_token_ids": [1, 2, 3],
        "completion_token_ids": [4, 5],
        "logprobs": [-0.5, -0.25],
        "max_tokens": 150,
        "seed": None,
        "finish_reason": "stop",
        "trainable": "untrainable_reason" not in changes,
        "untrainable_reason": None,
        "started_at": datetime(2025, 11, 14, 9, 2, tzinfo=UTC),
        "latency_ms": 3,
    }
    return RecordedCall(**{**given, **changes})


def test_the_gateways_record_supplies_tokens_logprobs_version_and_sampling():
    (one,) = policy_calls("t1", played(step(0)), {}, [recorded()])
    assert not one.retokenized
    assert (one.prompt_token_ids, one.completion_token_ids) == ((1, 2, 3), (4, 5))
    assert one.logprobs == (-0.5, -0.25)
    assert (one.policy_version, one.temperature, one.top_p) == (3, 0.9, 0.95)
    assert (one.messages, one.response) == (PROMPT, "HOLD")


@pytest.mark.parametrize(
    "record",
    [
        recorded(response="HOLD "),
        recorded(number=1),
        recorded(messages=PROMPT[1:]),
        recorded(messages=[]),
        recorded(logprobs=[], completion_token_ids=[], prompt_token_ids=[]),
        recorded(logprobs=[-0.5]),
        recorded(completion_token_ids=[], logprobs=[]),
        replace(recorded(), messages="not JSON"),
    ],
)
def test_a_different_record_or_one_without_tokens_leaves_only_text(record):
    (one,) = policy_calls("t1", played(step(0)), {}, [record])
    assert one.retokenized
    assert (one.policy_version, one.logprobs) == (None, None)
    assert (one.temperature, one.top_p) == (0.7, 1.0)


def test_a_call_without_id_shows_all_that_its_tokens_stand_for():
    """Otherwise readers and the scrubbing of a dataset would miss a part of what goes out."""
    answer = msgspec.json.encode({"tool_calls": [CALLED], "reasoning_content": "mail bob"}).decode()
    tool = {"type": "function", "function": {"name": "price"}}
    parameters = msgspec.json.encode({"tools": [tool]}).decode()
    record = recorded(answer=answer, parameters=parameters)
    (one,) = policy_calls("t1", played(step(0)), {}, [record])
    assert not one.retokenized
    assert (one.reasoning, one.tool_calls, one.tools) == ("mail bob", (CALLED,), (tool,))


@pytest.mark.parametrize(
    ("sent", "unseen"),
    [
        ({"documents": [{"text": "mail bob"}]}, True),
        ({"chat_template": "mail bob"}, True),
        ({"chat_template_kwargs": {"to": "bob@a.io"}}, True),
        ({"chat_template_kwargs": {"facts": ["bob"]}}, True),
        ({"reasoning_effort": "bob@a.io"}, True),
        ({"chat_template_kwargs": {"thinking_budget": 9}, "reasoning_effort": "high"}, False),
        ({"include_reasoning": False}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}, "include_reasoning": True}, False),
        ({"temperature": 1.0}, False),
    ],
)
def test_tokens_of_text_that_only_parameters_hold_are_marked(sent, unseen):
    """Scrubbing searches the fields, so these tokens are not published."""
    record = recorded(parameters=msgspec.json.encode(sent).decode())
    (one,) = policy_calls("t1", played(step(0)), {}, [record])
    assert one.unseen is unseen and not one.retokenized


@pytest.mark.parametrize(
    "tokens", [{}, {"prompt_token_ids": [], "completion_token_ids": [], "logprobs": []}]
)
def test_what_the_gateway_marked_untrainable_is_marked_so_and_has_no_tokens(tokens):
    records = [recorded(untrainable_reason="top_p 0.95", **tokens), recorded(number=1)]
    marked, fine = policy_calls("t1", played(step(0), step(1)), {}, records)
    assert (marked.untrainable, marked.retokenized) == ("top_p 0.95", True)
    assert (fine.untrainable, fine.retokenized) == (None, False)


def test_an_untrainable_record_of_another_answer_does_not_mark_the_call():
    records = [recorded(response="HOL", untrainable_reason="the client left"), recorded()]
    (one,) = policy_calls("t1", played(step(0)), {}, records)
    assert (one.untrainable, one.retokenized) == (None, False)


@pytest.mark.parametrize("sent", [PROMPT[1:], (Message(role="system", content=""), PROMPT[1])])
@pytest.mark.parametrize("logged", [PROMPT[1:], (Message(role="system", content=""), PROMPT[1])])
def test_an_empty_system_prompt_is_none_for_game_and_gateway(sent, logged):
    logs = {"t1-call-0-0": ("HOLD", compact(logged), None)}
    steps = played(step(0, llmCalls=[call(systemPrompt="")]))
    (one,) = policy_calls("t1", steps, logs, [recorded(messages=sent)])
    assert not one.retokenized
    assert one.messages == PROMPT[1:]


def test_calls_of_a_step_are_joined_in_order_and_each_record_once():
    twice = played(step(0, llmCalls=[call(), call(response="BUY"), call()]), step(1))
    records = [
        recorded(prompt_token_ids=[1]),
        recorded(response="retried", prompt_token_ids=[2]),
        recorded(response="BUY", prompt_token_ids=[3]),
        recorded(prompt_token_ids=[4]),
    ]
    calls = policy_calls("t1", twice, {}, records)
    assert [one.prompt_token_ids for one in calls] == [(1,), (3,), (4,), None]
    assert [one.step for one in calls] == [0, 0, 0, 1]


def test_a_call_that_names_its_record_is_that_record_whatever_the_texts_say():
    answer = {"role": "assistant", "content": None, "reasoning": "cheap", "tool_calls": [CALLED]}
    sent = ({"role": "user", "content": [{"type": "text", "text": "Trade?"}]},)
    record = recorded(
        response="",
        number=None,
        messages=sent,
        answer=compact(answer),
        parameters=compact({"tools": [CALLED]}),
    )
    other = recorded(number=0)
    steps = played(step(0), step(1, llmCalls=[call(callId=record.call_id, response="?")]))
    by_text, by_id = policy_calls("t1", steps, {}, [record, other])
    assert not by_text.retokenized and not by_id.retokenized
    assert (by_id.messages, by_id.response, by_id.tool_calls) == (sent, "", (CALLED,))
    assert (by_id.reasoning, by_id.tools) == ("cheap", (CALLED,))
    assert by_text.tool_calls == ()


def test_a_call_without_an_id_does_not_get_the_record_of_another_one():
    records = [recorded(prompt_token_ids=[1]), recorded(prompt_token_ids=[2])]
    calls = [call(), call(callId=records[0].call_id)]
    by_text, by_id = policy_calls("t1", played(step(0, llmCalls=calls)), {}, records)
    assert (by_text.prompt_token_ids, by_id.prompt_token_ids) == ((2,), (1,))


def test_an_empty_result_of_a_tool_stays_in_the_history():
    sent = (*PROMPT, {"role": "tool", "content": "", "tool_call_id": "x"})
    record = recorded(messages=sent)
    (one,) = policy_calls(
        "t1", played(step(0, llmCalls=[call(callId=record.call_id)])), {}, [record]
    )
    assert one.messages == sent


def test_an_id_is_used_once_and_an_unknown_one_is_no_obstacle():
    record = recorded()
    named = call(callId=record.call_id)
    first, second, own = policy_calls(
        "t1", played(step(0, llmCalls=[named, named, call(callId="the game's")])), {}, [record]
    )
    assert [one.retokenized for one in (first, second, own)] == [False, True, True]


@pytest.mark.parametrize("answer", ["nonsense", "[]", '{"tool_calls": 7}'])
def test_a_record_that_cannot_be_read_costs_only_its_tool_calls(answer):
    record = recorded(answer=answer, parameters='{"tools": "x"}')
    (one,) = policy_calls(
        "t1", played(step(0, llmCalls=[call(callId=record.call_id)])), {}, [record]
    )
    assert (one.tool_calls, one.tools, one.retokenized) == ((), (), False)


@pytest.mark.parametrize("deep", [150, 300, 900, 5000])
def test_a_record_too_deep_for_later_readers_leaves_the_prompts(deep):
    nested = "[" * deep + "]" * deep
    record = replace(
        recorded(),
        messages=f'[{{"role":"user","content":"Trade?","x":{nested}}}]',
        parameters=f'{{"tools":[{{"x":{nested}}}]}}',
        answer=f'{{"tool_calls":[{{"x":{nested}}}]}}',
    )
    (one,) = policy_calls(
        "t1", played(step(0, llmCalls=[call(callId=record.call_id)])), {}, [record]
    )
    kept = deep < MAX_DEPTH
    assert ("x" in one.messages[0], bool(one.tools), bool(one.tool_calls)) == (kept, kept, kept)
    assert not one.retokenized


def test_evaluation_calls_are_not_trained():
    purposes = ("evaluation", "action", "reasoning", "response", "evaluation")
    calls = [call(purpose=purpose, response=purpose) for purpose in purposes]
    trained = policy_calls("t1", played(step(0, llmCalls=calls)), {}, [])
    assert [one.response for one in trained] == ["action", "reasoning", "response"]


def test_the_logged_messages_win_over_the_two_prompts():
    chat = [*PROMPT, Message(role="assistant", content="Hm."), Message(role="user", content="So?")]
    logs = {"t1-call-0-0": ("HOLD", compact(chat), 0.5)}
    (one,) = policy_calls("t1", played(step(0)), logs, [recorded(messages=chat)])
    assert one.messages == tuple(chat)
    assert not one.retokenized
    (text,) = policy_calls("t1", played(step(0)), logs, [])
    assert (text.messages, text.top_p) == (tuple(chat), 0.5)


@pytest.mark.parametrize(
    "log",
    [
        {"t1-call-0-1": ("HOLD", "[]", None)},
        {"t1-call-0-0": ("BUY", "[]", None)},
        {"t1-call-0-0": ("HOLD", "[{", None)},
        {"t1-call-0-0": ("HOLD", None, None)},
    ],
)
def test_without_a_matching_readable_log_the_two_prompts_are_the_messages(log):
    (one,) = policy_calls("t1", played(step(0)), log, [])
    assert one.messages == PROMPT
