"""Results of a trajectory: its profit in the window, and its counts of wins and actions."""

import math
from collections.abc import Sequence

from babylon.quality.correctness import StepReward
from babylon.quality.decode import GameAction, GameMetrics, GameStep
from babylon.quality.reasons import Reason, RejectedError

HOLD = "HOLD"
_CLOSING = ("SELL", "CLOSE")


def window_pnl_usd(
    steps: Sequence[GameStep], metrics: GameMetrics, final_pnl_usd: float | None
) -> float:
    """Return the profit in this window (USD): the last lifetime P&L minus that of the first step.

    Raises:
        RejectedError: the difference is not a finite number.
    """
    known = (final_pnl_usd, metrics.final_pnl, steps[-1].environment_state.agent_pnl)
    last = next(value for value in known if value is not None)
    pnl = last - steps[0].environment_state.agent_pnl
    if not math.isfinite(pnl):
        raise RejectedError(Reason.NON_FINITE_NUMBER, f"finalPnL {last!r}: P&L is {pnl!r}")
    return pnl


def won(action: GameAction) -> bool | None:
    """Return True if the action's trade made money, ``None`` if the action decided no trade.

    The recorded ``correctness`` counts first. Without it, a successful sale or close wins if its
    ``result.pnl`` is above zero.
    """
    if not action.success:
        return None
    if action.correctness is not None:
        for verdict in (action.correctness.prediction_correct, action.correctness.perp_correct):
            if verdict is not None:
                return verdict
    if not action.action_type.startswith(_CLOSING) or not isinstance(action.result, dict):
        return None
    pnl = action.result.get("pnl")
    if isinstance(pnl, bool) or not isinstance(pnl, int | float):
        return None
    return pnl > 0


def count_wins(steps: Sequence[GameStep], derived: Sequence[StepReward] = ()) -> tuple[int, int]:
    """Return ``(wins, trades)`` over the decided trades.

    A step's own verdict counts first, then the reward ``derived`` from the window's outcomes.
    """
    later = {reward.step_number: reward.correct for reward in derived}
    wins = trades = 0
    for step in steps:
        verdict = won(step.action)
        if verdict is None:
            verdict = later.get(step.step_number)
        if verdict is not None:
            wins += verdict
            trades += 1
    return wins, trades


def count_actions(steps: Sequence[GameStep]) -> int:
    """Return the number of successful actions other than HOLD."""
    actions = [step.action for step in steps]
    return len([a for a in actions if a.success and a.action_type != HOLD])
