"""The check of one game row: a trajectory, or the first ``Reason`` that applies.

Every step counts as an action, including HOLD, so an agent that mostly waits is eligible.
"""

import math
from functools import lru_cache

import msgspec

from babylon.core.game_rows import GameRow
from babylon.core.settings import QualitySettings
from babylon.core.trajectories import Trajectory
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
from babylon.quality.policy_calls import CollectedCall, policy_calls
from babylon.store.rejections import Rejection

MAX_DETAIL = 300  # characters, because a detail may quote the row
_CALLS = msgspec.json.Decoder(list[CollectedCall])


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
