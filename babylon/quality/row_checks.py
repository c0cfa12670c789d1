"""The check of one game row: a trajectory, or the first ``Reason`` that applies.

Every step counts as an action, including HOLD, so an agent that mostly waits is eligible.

The policy's calls are joined from three places by equality and in order: a step gives the calls and
their replies, the game's call log the messages that were sent, the gateway the tokens. A call stays
text-only (``Call.retokenized``) unless a gateway record has the same messages and the same reply.
Empty messages are dropped before the comparison, because the game logs an empty system prompt for
agents that have none.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from babylon.core.game_rows import GameRow
from babylon.core.settings import QualitySettings
from babylon.core.trajectories import Call, Message, Trajectory
from babylon.core.windows import FIRST_YEAR, LAST_YEAR, Window
from babylon.quality.correctness import (
    Outcomes,
    StepReward,
    count_actions,
    count_wins,
    step_rewards,
    window_pnl_usd,
)
from babylon.quality.decode import (
    PENDING,
    POLICY_PURPOSES,
    GameLlmCall,
    GameMetadata,
    GameMetrics,
    GameStep,
    Reason,
    RejectedError,
    decode,
)
from babylon.store.rejections import Rejection

MAX_DETAIL = 300  # characters, because a detail may quote the row
_DECODER = msgspec.json.Decoder(tuple[Message, ...])


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


_CALLS = msgspec.json.Decoder(list[CollectedCall])


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


def _messages(text: str) -> tuple[Message, ...] | None:
    try:
        messages = _DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    if all([message.content for message in messages]):
        return messages
    return tuple(message for message in messages if message.content)


class Accepted(msgspec.Struct, frozen=True):
    """A sound trajectory, its ground truth (for the judge only), and the rewards of its trades."""

    trajectory: Trajectory
    game_knowledge: dict[str, object]
    step_rewards: tuple[StepReward, ...]


def check_row(row: GameRow, window: Window, quality: QualitySettings) -> Accepted | Rejection:
    """Accept the row, or reject it with a reason. Bad data raises no error."""
    try:
        return _accept(row, window, quality)
    except RejectedError as error:
        return Rejection(
            trajectory_id=row.trajectory_id, reason=error.reason, detail=error.detail[:MAX_DETAIL]
        )


def _accept(row: GameRow, window: Window, quality: QualitySettings) -> Accepted:
    # The order of the checks is that of ``Reason``, because the first failure is reported.
    if row.start is None or row.end is None:
        raise RejectedError(
            Reason.OTHER_WINDOW,
            f"{'startTime' if row.start is None else 'endTime'} is infinite or not between"
            f" {FIRST_YEAR} and {LAST_YEAR}, window is {window.id}",
        )
    if not window.contains(row.start):
        raise RejectedError(
            Reason.OTHER_WINDOW, f"started {row.start:%Y-%m-%dT%H:%M:%S}, window is {window.id}"
        )
    steps = decode(row.steps_json, tuple[GameStep, ...], "stepsJson")
    metrics = decode(row.metrics_json, GameMetrics, "metricsJson")
    metadata = decode(row.metadata_json, GameMetadata, "metadataJson")
    decode(row.reward_components_json, dict[str, object], "rewardComponentsJson")
    if not math.isfinite(row.total_reward):
        raise RejectedError(Reason.NON_FINITE_NUMBER, f"totalReward is {row.total_reward}")
    if not steps:
        raise RejectedError(Reason.EMPTY_STEPS, "stepsJson is []")
    pnl_usd = window_pnl_usd(steps, metrics, row.final_pnl_usd)
    _check_play(steps, row.total_reward, quality)
    scenario_id = row.scenario_id or window.id
    rewards = step_rewards(steps, _outcomes(row.outcomes_json), scenario_id)
    wins, trades = count_wins(steps, rewards)
    trajectory = Trajectory(
        trajectory_id=row.trajectory_id,
        agent_id=row.agent_id,
        window_id=window.id,
        scenario_id=scenario_id,
        start=row.start,
        end=row.end,
        pnl_usd=pnl_usd,
        wins=wins,
        trades=trades,
        actions=count_actions(steps),
        steps=len(steps),
        calls=policy_calls(
            row.trajectory_id, steps, _CALLS.decode(row.logs_json), _CALLS.decode(row.gateway_json)
        ),
    )
    return Accepted(trajectory, metadata.game_knowledge, rewards)


def _check_play(steps: tuple[GameStep, ...], total_reward: float, quality: QualitySettings) -> None:
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
    calls = [call for step in steps for call in step.llm_calls if call.purpose in POLICY_PURPOSES]
    if not calls:
        raise RejectedError(Reason.NO_LLM_CALL, f"{len(steps)} steps without an LLM call")
    for call in calls:
        if not (call.response or "").strip():
            raise RejectedError(Reason.NO_RESPONSE, f"{_place(call, steps)}.response")
        if not call.system_prompt and not call.user_prompt:
            raise RejectedError(Reason.MISSING_FIELD, f"{_place(call, steps)}.userPrompt is empty")
    if len(steps) < quality.min_actions:
        raise RejectedError(
            Reason.TOO_FEW_ACTIONS, f"{len(steps)} actions, minimum is {quality.min_actions}"
        )
    threshold = quality.reward_threshold
    if threshold is not None and total_reward < threshold:
        raise RejectedError(
            Reason.BELOW_REWARD_THRESHOLD, f"totalReward {total_reward:g} is below {threshold:g}"
        )


def _place(wanted: GameLlmCall, steps: tuple[GameStep, ...]) -> str:
    return next(
        f"stepsJson[{i}].llmCalls[{j}]"
        for i, step in enumerate(steps)
        for j, call in enumerate(step.llm_calls)
        if call is wanted
    )


@lru_cache(maxsize=4)  # every row of a window has the same text
def _outcomes(text: str) -> Outcomes:
    return Outcomes(msgspec.json.decode(text, type=list[dict[str, object]]))
