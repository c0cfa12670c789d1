"""The calls of a trajectory that train the policy, with their exact tokens if they are known.

A step gives the calls and their replies. The game's call log has the messages that were sent. The
gateway has the tokens. The three are joined by equality and in order. A call stays text-only
(``Call.retokenized``) unless a gateway record has the same messages and the same reply. Empty
messages are dropped before the comparison, because the game logs an empty system prompt for agents
that have none.
"""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from babylon.core.trajectories import Call, Message
from babylon.quality.decode import POLICY_PURPOSES, GameLlmCall, GameStep


class CollectedCall(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A call that ``collect`` joined to a trajectory, from ``llm_call_logs`` or ``babylon.calls``.

    A logged call has a ``call_id``: ``<trajectory>-call-<step>-<i>``, or the id that the step
    gives. A gateway's call has a ``step_number`` and a policy version, and either tokens or the
    reason why it is ``untrainable``. ``messages`` is JSON.
    """

    response: str
    messages: str | None = None
    call_id: str | None = None
    step_number: int | None = None
    temperature: float = 1.0
    top_p: float | None = None
    policy_version: int | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    completion_token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    untrainable: str | None = None

    @property
    def has_tokens(self) -> bool:
        return bool(
            self.prompt_token_ids
            and self.completion_token_ids
            and self.logprobs
            and len(self.logprobs) == len(self.completion_token_ids)
        )


def policy_calls(
    trajectory_id: str,
    steps: Sequence[GameStep],
    logged: Sequence[CollectedCall],
    gateway: Sequence[CollectedCall],
) -> tuple[Call, ...]:
    """Return the policy's calls in playing order. ``gateway`` is ordered by time.

    Evaluation calls are left out, because the policy did not answer them.
    """
    logs = {call.call_id: call for call in logged}
    waiting: defaultdict[int | None, list[CollectedCall]] = defaultdict(list)
    for record in gateway:
        waiting[record.step_number].append(record)
    calls = []
    for step in steps:
        for index, call in enumerate(step.llm_calls):
            if call.purpose in POLICY_PURPOSES:
                log = None
                if logs:
                    own_id = f"{trajectory_id}-call-{step.step_number}-{index}"
                    named = logs.get(call.call_id) if isinstance(call.call_id, str) else None
                    log = named or logs.get(own_id)
                text = _text_call(step.step_number, call, log)
                calls.append(_with_tokens(text, waiting[step.step_number]) if waiting else text)
    return tuple(calls)


def _text_call(step: int, call: GameLlmCall, log: CollectedCall | None) -> Call:
    messages, top_p = None, None
    if log is not None and log.response == call.response:
        messages, top_p = _messages(log.messages or ""), log.top_p
    if not messages:
        system, user = call.system_prompt, call.user_prompt
        messages = (Message(role="system", content=system),) if system else ()
        messages += (Message(role="user", content=user),) if user else ()
    return Call(
        step=step,
        messages=messages,
        response=call.response or "",
        temperature=call.temperature,
        top_p=1.0 if top_p is None else top_p,
    )


def _with_tokens(call: Call, waiting: list[CollectedCall]) -> Call:
    """Return the call with the tokens of the first equal record, or with its reason against them.

    That record and all earlier ones are removed from ``waiting``, because calls come in order.
    """
    for position, record in enumerate(waiting):
        if record.response == call.response and _messages(record.messages or "") == call.messages:
            del waiting[: position + 1]
            if record.untrainable is None and record.has_tokens:
                return _joined(call, record)
            return msgspec.structs.replace(call, untrainable=record.untrainable)
    return call


def _joined(call: Call, record: CollectedCall) -> Call:
    return msgspec.structs.replace(
        call,
        temperature=record.temperature,
        top_p=1.0 if record.top_p is None else record.top_p,
        policy_version=record.policy_version,
        prompt_token_ids=record.prompt_token_ids,
        completion_token_ids=record.completion_token_ids,
        logprobs=record.logprobs,
    )


_DECODER = msgspec.json.Decoder(tuple[Message, ...])


def _messages(text: str) -> tuple[Message, ...] | None:
    try:
        messages = _DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    if all([message.content for message in messages]):
        return messages
    return tuple(message for message in messages if message.content)
