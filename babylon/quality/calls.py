"""The calls of a trajectory that train the policy, with the exact tokens where they are known.

The step says which calls there were and what came back; the game's call log has the messages that
were really sent; the gateway has the tokens. The three are joined by equality and in order, and a
call whose gateway record does not say exactly the same stays text-only (``Call.retokenized``).
Empty messages say nothing: agents without a system prompt are logged with an empty one.
"""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from babylon.core.trajectories import Call, Message
from babylon.quality.decode import POLICY_PURPOSES, LlmCall, Step


class LoggedCall(msgspec.Struct, frozen=True, gc=False):
    """A row of the game's ``llm_call_logs``; ``call_id`` is ``<trajectory>-call-<step>-<i>``,
    or the one that the step names."""

    call_id: str
    response: str
    messages_json: str | None = None
    top_p: float | None = None


class GatewayCall(msgspec.Struct, frozen=True, gc=False):
    """A row of ``babylon.calls``; ``untrainable`` says why, and then there are no tokens."""

    step_number: int
    messages: str
    response: str
    temperature: float
    top_p: float
    policy_version: int
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
    steps: Sequence[Step],
    logged: Sequence[LoggedCall],
    gateway: Sequence[GatewayCall],
) -> tuple[Call, ...]:
    """The policy's calls in playing order; ``gateway`` is ordered by time. Evaluation calls are
    somebody else's answers."""
    logs = {call.call_id: call for call in logged}
    waiting: defaultdict[int, list[GatewayCall]] = defaultdict(list)
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


def _text_call(step: int, call: LlmCall, log: LoggedCall | None) -> Call:
    messages, top_p = None, None
    if log is not None and log.response == call.response:
        messages, top_p = _messages(log.messages_json or ""), log.top_p
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


def _with_tokens(call: Call, waiting: list[GatewayCall]) -> Call:
    """The call with the tokens of the first record that says the same, or why they must not be
    trained on; earlier records are skipped."""
    for position, record in enumerate(waiting):
        if record.response == call.response and _messages(record.messages) == call.messages:
            del waiting[: position + 1]
            if record.untrainable is None and record.has_tokens:
                return _joined(call, record)
            return msgspec.structs.replace(call, untrainable=record.untrainable)
    return call


def _joined(call: Call, record: GatewayCall) -> Call:
    return msgspec.structs.replace(
        call,
        temperature=record.temperature,
        top_p=record.top_p,
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
