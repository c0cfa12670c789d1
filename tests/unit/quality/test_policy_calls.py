"""The calls that are trained, and their tokens from the gateway."""

import msgspec
import pytest

from babylon.core.trajectories import Message
from babylon.quality.decode import GameStep
from babylon.quality.row_checks import CollectedCall, policy_calls
from tests.unit.quality.rows import call, compact, step

PROMPT = (Message(role="system", content="You trade."), Message(role="user", content="Trade?"))


def played(*steps):
    return msgspec.convert(list(steps), tuple[GameStep, ...])


def recorded(response="HOLD", number=0, messages=PROMPT, **changes):
    given = {
        "step_number": number,
        "messages": msgspec.json.encode(messages).decode(),
        "response": response,
        "temperature": 0.9,
        "top_p": 0.95,
        "policy_version": 3,
        "prompt_token_ids": (1, 2, 3),
        "completion_token_ids": (4, 5),
        "logprobs": (-0.5, -0.25),
    }
    return CollectedCall(**{**given, **changes})


def test_the_gateways_record_supplies_tokens_logprobs_version_and_sampling():
    (one,) = policy_calls("t1", played(step(0)), [], [recorded()])
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
        recorded(logprobs=None, completion_token_ids=None, prompt_token_ids=None),
        recorded(logprobs=(-0.5,)),
        recorded(completion_token_ids=(), logprobs=()),
        msgspec.structs.replace(recorded(), messages="not JSON"),
    ],
)
def test_a_different_record_or_one_without_tokens_leaves_only_text(record):
    (one,) = policy_calls("t1", played(step(0)), [], [record])
    assert one.retokenized
    assert (one.policy_version, one.logprobs) == (None, None)
    assert (one.temperature, one.top_p) == (0.7, 1.0)


@pytest.mark.parametrize(
    "tokens", [{}, {"prompt_token_ids": None, "completion_token_ids": None, "logprobs": None}]
)
def test_what_the_gateway_marked_untrainable_is_marked_so_and_has_no_tokens(tokens):
    records = [recorded(untrainable="top_p 0.95", **tokens), recorded(number=1)]
    marked, fine = policy_calls("t1", played(step(0), step(1)), [], records)
    assert (marked.untrainable, marked.retokenized) == ("top_p 0.95", True)
    assert (fine.untrainable, fine.retokenized) == (None, False)


def test_an_untrainable_record_of_another_answer_does_not_mark_the_call():
    records = [recorded(response="HOL", untrainable="the client left"), recorded()]
    (one,) = policy_calls("t1", played(step(0)), [], records)
    assert (one.untrainable, one.retokenized) == (None, False)


@pytest.mark.parametrize("sent", [PROMPT[1:], (Message(role="system", content=""), PROMPT[1])])
@pytest.mark.parametrize("logged", [PROMPT[1:], (Message(role="system", content=""), PROMPT[1])])
def test_an_empty_system_prompt_is_none_for_game_and_gateway(sent, logged):
    log = CollectedCall(
        call_id="t1-call-0-0",
        response="HOLD",
        messages=compact([msgspec.to_builtins(message) for message in logged]),
    )
    steps = played(step(0, llmCalls=[call(systemPrompt="")]))
    (one,) = policy_calls("t1", steps, [log], [recorded(messages=sent)])
    assert not one.retokenized
    assert one.messages == PROMPT[1:]


def test_calls_of_a_step_are_joined_in_order_and_each_record_once():
    twice = played(step(0, llmCalls=[call(), call(response="BUY"), call()]), step(1))
    records = [
        recorded(prompt_token_ids=(1,)),
        recorded(response="retried", prompt_token_ids=(2,)),
        recorded(response="BUY", prompt_token_ids=(3,)),
        recorded(prompt_token_ids=(4,)),
    ]
    calls = policy_calls("t1", twice, [], records)
    assert [one.prompt_token_ids for one in calls] == [(1,), (3,), (4,), None]
    assert [one.step for one in calls] == [0, 0, 0, 1]


def test_evaluation_calls_are_not_trained():
    purposes = ("evaluation", "action", "reasoning", "response", "evaluation")
    calls = [call(purpose=purpose, response=purpose) for purpose in purposes]
    trained = policy_calls("t1", played(step(0, llmCalls=calls)), [], [])
    assert [one.response for one in trained] == ["action", "reasoning", "response"]


def test_the_logged_messages_win_over_the_two_prompts():
    chat = [*PROMPT, Message(role="assistant", content="Hm."), Message(role="user", content="So?")]
    log = CollectedCall(
        call_id="t1-call-0-0",
        response="HOLD",
        messages=compact([msgspec.to_builtins(message) for message in chat]),
        top_p=0.5,
    )
    (one,) = policy_calls("t1", played(step(0)), [log], [recorded(messages=chat)])
    assert one.messages == tuple(chat)
    assert not one.retokenized
    (text,) = policy_calls("t1", played(step(0)), [log], [])
    assert (text.messages, text.top_p) == (tuple(chat), 0.5)


@pytest.mark.parametrize(
    "log",
    [
        CollectedCall(call_id="t1-call-0-1", response="HOLD", messages="[]"),
        CollectedCall(call_id="t1-call-0-0", response="BUY", messages="[]"),
        CollectedCall(call_id="t1-call-0-0", response="HOLD", messages="[{"),
        CollectedCall(call_id="t1-call-0-0", response="HOLD", messages=None),
    ],
)
def test_without_a_matching_readable_log_the_two_prompts_are_the_messages(log):
    (one,) = policy_calls("t1", played(step(0)), [log], [])
    assert one.messages == PROMPT
