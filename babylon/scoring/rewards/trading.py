"""The trading reward, an example of a custom scorer:
``babylon.scoring.rewards.trading:trading_reward``.

    reward = 0.5 * profit + 0.2 * speed + 0.3 * consistency        each part in [0, 1]

    profit       0.5 + r / 2, with r the window's P&L (USD) / capital, clipped to [-1, 1]; the
                 capital is the cash at the first step (USD), at least the game's initial 1000
    speed        1 - mean holding time of positions / duration of the trajectory; an open position
                 is held to the end; 0 without a position
    consistency  gains / (gains + losses), the sums of the P&L's moves up and down (USD) from step
                 to step and to the window's end; 0.5 if it moved by rounding alone

The first successful BUY or OPEN action in a market without a position opens one. The next
successful SELL or CLOSE closes it. Amounts do not matter.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from statistics import fmean

import msgspec

from babylon.core.errors import ScoringError
from babylon.core.trajectories import Trajectory
from babylon.core.types import Rejection
from babylon.quality.decode import MAX_DETAIL, Reason
from babylon.scoring.judge.evidence import read_evidence
from babylon.scoring.judge.judgment import JudgedTrajectory
from babylon.scoring.rewards.heuristic import TIE_USD
from babylon.scoring.scorer import Score, ScoreOrRejection, ScoringContext

WEIGHTS = {"profit": 0.5, "speed": 0.2, "consistency": 0.3}
START_BALANCE_USD = 1000.0
OPENING, CLOSING = ("BUY", "OPEN"), ("SELL", "CLOSE")


class _State(msgspec.Struct, frozen=True):
    pnl_usd: float = msgspec.field(name="agentPnL")
    balance_usd: float = msgspec.field(name="agentBalance")


class _Action(msgspec.Struct, frozen=True, rename="camel"):
    action_type: str
    success: bool
    parameters: Mapping[str, object] = {}


class _Step(msgspec.Struct, frozen=True, rename="camel"):
    timestamp: float  # milliseconds since 1970
    environment_state: _State
    action: _Action


def trading_reward(
    trajectories: Sequence[Trajectory], context: ScoringContext
) -> list[ScoreOrRejection]:
    """Return one score in [0, 1] for each trajectory, with its three parts.

    A trajectory whose steps lack a field that the reward needs is rejected.

    Raises:
        ScoringError: no trajectory has all fields.
    """
    judged, _, unreadable = read_evidence(context.settings.home, context.artifact)
    found: dict[str, ScoreOrRejection] = {one.trajectory_id: one for one in unreadable}
    failed: list[ScoringError] = []
    for one in judged:
        name = one.trajectory.trajectory_id
        try:
            found[name] = reward_of(one)
        except ScoringError as error:
            failed.append(error)
            found[name] = Rejection(
                trajectory_id=name, reason=Reason.NOT_READABLE, detail=str(error)[:MAX_DETAIL]
            )
    if failed and len(failed) == len(judged):  # the game does not record it
        raise failed[0]
    return [found[trajectory.trajectory_id] for trajectory in trajectories]


def reward_of(judged: JudgedTrajectory) -> Score:
    """Return the reward of one trajectory from its recorded steps.

    Raises:
        ScoringError: a step lacks a field that the reward needs, or its timestamp is no date.
    """
    own = judged.trajectory
    try:
        steps = msgspec.convert(judged.steps, tuple[_Step, ...], strict=True)
    except msgspec.ValidationError as error:
        raise ScoringError(
            f"trading reward of trajectory {own.trajectory_id}: {error};"
            " record the field, or use another scorer"
        ) from error
    try:
        components = {
            "profit": _profit(own, steps),
            "speed": _speed(own, steps),
            "consistency": _consistency(own, steps),
        }
    except (OverflowError, ValueError, OSError) as error:  # of a timestamp
        raise ScoringError(
            f"trading reward of trajectory {own.trajectory_id}: a timestamp is no date:"
            " record milliseconds since 1970, or use another scorer"
        ) from error
    return Score(sum(WEIGHTS[part] * value for part, value in components.items()), components)


def _profit(own: Trajectory, steps: Sequence[_Step]) -> float:
    cash = steps[0].environment_state.balance_usd if steps else 0.0
    gain = own.pnl_usd / max(cash, START_BALANCE_USD)
    return 0.5 + max(-1.0, min(1.0, gain)) / 2


def _speed(own: Trajectory, steps: Sequence[_Step]) -> float:
    duration_s = (own.end - own.start).total_seconds()
    held_s = _holding_times_s(steps, own.end)
    if not held_s or duration_s <= 0:
        return 0.0
    return 1 - min(1.0, fmean(held_s) / duration_s)


def _holding_times_s(steps: Sequence[_Step], end: datetime) -> list[float]:
    since: dict[str, datetime] = {}
    held = []
    for step in steps:
        market = step.action.parameters.get("marketId") or step.action.parameters.get("ticker")
        if market is None or not step.action.success:
            continue
        moment = datetime.fromtimestamp(step.timestamp / 1000, UTC)
        if step.action.action_type.startswith(OPENING):
            since.setdefault(str(market), moment)
        elif step.action.action_type.startswith(CLOSING) and str(market) in since:
            held.append(moment - since.pop(str(market)))
    held += [end - opened for opened in since.values()]
    return [max(time.total_seconds(), 0.0) for time in held]


def _consistency(own: Trajectory, steps: Sequence[_Step]) -> float:
    path = [step.environment_state.pnl_usd for step in steps]
    path.append((path[0] if path else 0.0) + own.pnl_usd)
    changes = [later - earlier for earlier, later in pairwise(path)]
    moved = sum(map(abs, changes))
    return sum(change for change in changes if change > 0) / moved if moved >= TIE_USD else 0.5
