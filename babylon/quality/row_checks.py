"""The check of one game row: a trajectory, or the first ``Reason`` that applies.

Every step counts as an action, including HOLD, so an agent that mostly waits is eligible.

A call that names the gateway's record by id is that record: messages, tools, answer and tokens.
Rows of the game name no such id. Their calls are joined from three places by equality and in order:
a step gives the calls and their replies, the game's call log the messages that were sent, the
gateway the tokens. Such a call stays text-only (``Call.retokenized``) unless a record of its step
has the same messages and the same reply. Empty prompts are dropped before the comparison, because
the game logs an empty system prompt for agents that have none.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import msgspec

from babylon.core.game_rows import GameRow
from babylon.core.llm_calls import POLICY_PURPOSES, JsonObject, LlmCall, Message, SentParameters
from babylon.core.settings import QualitySettings
from babylon.core.trajectories import Call, Trajectory
from babylon.core.types import Rejection
from babylon.core.windows import FIRST_YEAR, LAST_YEAR, Window, id_problem
from babylon.quality.correctness import (
    Outcomes,
    StepReward,
    count_actions,
    count_wins,
    drawdown_usd,
    step_rewards,
    window_pnl_usd,
)
from babylon.quality.decode import (
    PENDING,
    GameMetadata,
    GameMetrics,
    GameStep,
    Reason,
    RejectedError,
    decode,
    is_deep,
    rejected,
)
from babylon.quality.payoffs import payoffs
from babylon.store.calls import RecordedCall

T = TypeVar("T")


class RecordedAnswer(msgspec.Struct, frozen=True):
    """The parts of a recorded answer beside its text. Engines name the reasoning differently."""

    tool_calls: tuple[JsonObject, ...] = ()
    reasoning: str | None = None
    reasoning_content: str | None = None


def read_or_none(text: str | None, kind: type[T]) -> T | None:
    """Decode JSON that nobody checked; ``None`` if it is missing, deep, or of another shape."""
    try:
        return None if text is None or is_deep(text) else msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError):
        return None


Log = tuple[str | None, str | None, float | None]
"""Response, messages (JSON) and top_p of a row of ``llm_call_logs``."""

_PROMPTS = ("system", "user")  # an empty result of a tool is a result
_GATEWAY = msgspec.json.Decoder(list[RecordedCall] | None)
_LOGS = msgspec.json.Decoder(dict[str, Log])


def policy_calls(
    trajectory_id: str,
    steps: Sequence[GameStep],
    logs: Mapping[str, Log],
    gateway: Iterable[RecordedCall],
) -> tuple[Call, ...]:
    """Return the policy's calls in playing order. ``gateway`` is ordered by time.

    Evaluation calls are left out, because the policy did not answer them.
    """
    unread = {record.call_id: record for record in gateway}
    ids = {str(call.call_id) for step in steps for call in step.llm_calls}
    named = {call_id: unread.pop(call_id) for call_id in ids & unread.keys()}
    calls = []
    for step in steps:
        for index, call in enumerate(step.llm_calls):
            if call.purpose in POLICY_PURPOSES:
                own_id = f"{trajectory_id}-call-{step.step_number}-{index}"
                call_id = str(call.call_id)
                if (record := named.pop(call_id, None)) is not None:
                    calls.append(_recorded_call(step.step_number, call, record))
                    continue
                log = logs.get(call_id) or logs.get(own_id)
                calls.append(_with_tokens(_text_call(step.step_number, call, log), unread))
    return tuple(calls)


def _recorded_call(step: int, call: LlmCall, record: RecordedCall) -> Call:
    """Return the call as the gateway recorded it. The agent's own words about it do not count."""
    text = Call(
        step=step,
        messages=_messages(record.messages) or call.prompt,
        response=record.response,
        temperature=record.temperature,
        top_p=record.top_p,
    )
    return _joined(text, record)


def _text_call(step: int, call: LlmCall, log: Log | None) -> Call:
    messages, top_p = None, None
    if log is not None and log[0] == call.response:
        messages, top_p = _messages(log[1] or ""), log[2]
    return Call(
        step=step,
        messages=messages or call.prompt,
        response=call.response or "",
        temperature=call.temperature,
        top_p=1.0 if top_p is None else top_p,
        tool_calls=call.tool_calls or (),
    )


def _with_tokens(call: Call, unread: dict[str, RecordedCall]) -> Call:
    """Return a call without id with the tokens of the first equal record, or its reason.

    That record and all earlier ones of the step are removed, because calls come in order.
    """
    earlier = []
    for call_id, record in unread.items():
        if record.step_number == call.step:
            earlier.append(call_id)
            if record.response == call.response and _messages(record.messages) == call.messages:
                for name in earlier:
                    del unread[name]
                return _joined(call, record)
    return call


def _joined(call: Call, record: RecordedCall) -> Call:
    """Return the call with what its token ids stand for, for readers and scrubbing too."""
    answer = read_or_none(record.answer, RecordedAnswer) or RecordedAnswer()
    sent = read_or_none(record.parameters, SentParameters) or SentParameters()
    call = msgspec.structs.replace(
        call,
        tools=sent.tools or (),
        unseen=sent.hides_text,
        tool_calls=answer.tool_calls or call.tool_calls,
        reasoning=answer.reasoning or answer.reasoning_content,
    )
    if not record.trainable:
        return msgspec.structs.replace(call, untrainable=record.untrainable_reason)
    if not record.has_tokens:
        return call
    return msgspec.structs.replace(
        call,
        temperature=record.temperature,
        top_p=record.top_p,
        policy_version=record.policy_version,
        prompt_token_ids=tuple(record.prompt_token_ids),
        completion_token_ids=tuple(record.completion_token_ids),
        logprobs=tuple(record.logprobs),
    )


def _messages(text: str) -> tuple[Message, ...] | None:
    messages = read_or_none(text, tuple[Message, ...])
    return messages and tuple(
        [one for one in messages if one.get("content") or one.get("role") not in _PROMPTS]
    )


class Accepted(msgspec.Struct, frozen=True):
    """A sound trajectory, its ground truth (for the judge only), and the rewards of its trades."""

    trajectory: Trajectory
    game_knowledge: dict[str, object]
    step_rewards: tuple[StepReward, ...]


def check_row(row: GameRow, window: Window, quality: QualitySettings) -> Accepted | Rejection:
    """Accept the row, or reject it with a reason. Bad data raises no error."""
    try:
        return _accept(row, window, quality)
    except Exception as error:  # whatever one row holds must not cost the others
        return rejected(row.trajectory_id, error)


def _accept(row: GameRow, window: Window, quality: QualitySettings) -> Accepted:
    # The order of the checks is that of ``Reason``, because the first failure is reported.
    if row.start is None or row.end is None:
        raise RejectedError(
            Reason.OTHER_WINDOW,
            f"{'startTime' if row.start is None else 'endTime'} is infinite or not between"
            f" {FIRST_YEAR} and {LAST_YEAR}, window is {window.id}",
        )
    started = f"started {row.start:%Y-%m-%dT%H:%M:%S}"
    if not window.contains(row.start):
        raise RejectedError(Reason.OTHER_WINDOW, f"{started}, window is {window.id}")
    named, hours = row.window_id, row.window_hours or 1
    if named is not None and (problem := id_problem(window, named, hours)):
        raise RejectedError(Reason.OTHER_WINDOW, f"{started}, but {problem}")
    steps = decode(row.steps_json, tuple[GameStep, ...], "stepsJson")
    metrics = decode(row.metrics_json, GameMetrics, "metricsJson")
    metadata = decode(row.metadata_json, GameMetadata, "metadataJson")
    decode(row.reward_components_json, dict[str, object], "rewardComponentsJson")
    if not math.isfinite(row.total_reward):
        raise RejectedError(Reason.NON_FINITE_NUMBER, f"totalReward is {row.total_reward}")
    if not steps:
        raise RejectedError(Reason.EMPTY_STEPS, "stepsJson is []")
    pnl_usd = window_pnl_usd(steps, metrics, row.final_pnl_usd)
    if (gateway := _GATEWAY.decode(row.gateway_json)) is None:
        # As text alone, replies would be trained that their records say must not be.
        raise RejectedError(Reason.TOO_MANY_CALLS, "the gateway's records are too large to be read")
    calls = policy_calls(row.trajectory_id, steps, _LOGS.decode(row.logs_json), gateway)
    _check_play(steps, calls, row.total_reward, quality)
    scenario_id = row.scenario_id or window.id
    outcomes = _outcomes(row.outcomes_json)
    rewards = step_rewards(steps, outcomes, scenario_id)
    wins, trades = count_wins(steps, rewards)
    trajectory = Trajectory(
        trajectory_id=row.trajectory_id,
        agent_id=row.agent_id,
        window_id=window.id,
        scenario_id=scenario_id,
        start=row.start,
        end=row.end,
        pnl_usd=pnl_usd,
        drawdown_usd=drawdown_usd(steps, pnl_usd),
        wins=wins,
        trades=trades,
        actions=count_actions(steps),
        steps=len(steps),
        calls=calls,
        payoffs=payoffs(steps, outcomes, scenario_id, pnl_usd),
    )
    return Accepted(trajectory, metadata.game_knowledge, rewards)


def _check_play(
    steps: tuple[GameStep, ...],
    calls: Sequence[Call],
    total_reward: float,
    quality: QualitySettings,
) -> None:
    # A recorder that lost or doubled a step shifts every later call, so this is checked first.
    numbers = [step.step_number for step in steps]
    for i in range(1, len(numbers)):
        if numbers[i] <= numbers[i - 1]:
            raise RejectedError(
                Reason.STEP_ORDER,
                f"stepsJson[{i}].stepNumber is {numbers[i]} after {numbers[i - 1]}",
            )
    acts = [step.action.action_type for step in steps]
    if PENDING in acts:
        raise RejectedError(
            Reason.UNFINISHED_STEP, f"stepsJson[{acts.index(PENDING)}].action is {PENDING}"
        )
    if not calls:
        raise RejectedError(Reason.NO_LLM_CALL, f"{len(steps)} steps without an LLM call")
    asked = [call for step in steps for call in step.llm_calls if call.purpose in POLICY_PURPOSES]
    for wanted, call in zip(asked, calls, strict=True):
        if not call.response.strip() and not call.tool_calls:
            raise RejectedError(Reason.NO_RESPONSE, f"{_place(wanted, steps)}.response")
        if not call.messages:
            detail = f"{_place(wanted, steps)}.userPrompt is empty"
            raise RejectedError(Reason.MISSING_FIELD, detail)
    if len(steps) < quality.min_actions:
        raise RejectedError(
            Reason.TOO_FEW_ACTIONS, f"{len(steps)} actions, minimum is {quality.min_actions}"
        )
    threshold = quality.reward_threshold
    if threshold is not None and total_reward < threshold:
        raise RejectedError(
            Reason.BELOW_REWARD_THRESHOLD, f"totalReward {total_reward:g} is below {threshold:g}"
        )


def _place(wanted: LlmCall, steps: tuple[GameStep, ...]) -> str:
    return next(
        f"stepsJson[{i}].llmCalls[{j}]"
        for i, step in enumerate(steps)
        for j, call in enumerate(step.llm_calls)
        if call is wanted
    )


@lru_cache(maxsize=4)  # every row of a window has the same text
def _outcomes(text: str) -> Outcomes:
    return Outcomes(msgspec.json.decode(text, type=list[dict[str, object]]))
