"""Results of a trajectory: profit, wins and actions, and the correctness of its trades.

Correctness is derived from the window's outcomes. Recorded steps stay unchanged.

A trade is decided here if its position was held to the end. If the position was sold or closed in
the trajectory, that later step records the result.

    prediction  correct if its side is the resolution; reward = shares / dollars - 1, else -1
    perpetual   correct if the price moved in its direction until the window's last price;
                reward = leverage * (end / entry - 1), with the sign reversed for a short position

A reward is the return on the money at stake, clipped to [-1, 1]. A correct prediction without
recorded shares or dollars gets 1. A perpetual without an entry price uses the window's first price.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec

from babylon.core.game_rows import scenario_market, scenario_ticker
from babylon.quality.decode import GameAction, GameMetrics, GameStep, Reason, RejectedError
from babylon.quality.traded import (
    CLOSING,
    DECISION,
    MOST,
    OPENING,
    market_of,
    number_of,
    positive,
    side_of,
)

HOLD = "HOLD"
_SIDES = {"LONG": 1, "SHORT": -1}


class StepReward(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Correctness and reward of one step's trade: a prediction or a perpetual, never both."""

    step_number: int
    reward: float
    prediction_correct: bool | None = None
    perp_correct: bool | None = None

    @property
    def correct(self) -> bool:
        return bool(self.prediction_correct or self.perp_correct)


class Outcomes:
    """The window's ``market_outcomes`` by market. Open questions and non-numbers are left out.

    A market may be named with its scenario (``babylon.core.game_rows``). That name counts first.
    """

    def __init__(self, rows: Sequence[Mapping[str, object]]) -> None:
        self.resolved: dict[str, str] = {}
        self.prices: dict[str, tuple[float, float]] = {}
        for row in rows:
            answer = str(row.get("outcome")).upper()
            if (market := row.get("predictionMarketId")) and answer in ("YES", "NO"):
                self.resolved[str(market)] = answer
            start, end = positive(row.get("startPrice")), positive(row.get("endPrice"))
            if (ticker := row.get("stockTicker")) and start and end:
                self.prices[str(ticker)] = (start, end)

    def answer(self, scenario_id: str, market: str) -> str | None:
        """Return the resolution of a question, ``YES`` or ``NO``."""
        own = self.resolved.get(scenario_market(scenario_id, market))
        return own or self.resolved.get(market)

    def start_and_end(self, scenario_id: str, ticker: str) -> tuple[float, float] | None:
        """Return the window's first and last price of a perpetual in dollars."""
        for name in (
            scenario_ticker(scenario_id, ticker),
            scenario_market(scenario_id, ticker),
            ticker,
        ):
            if prices := self.prices.get(name):
                return prices
        return None

    def __bool__(self) -> bool:
        return bool(self.resolved or self.prices)


def window_pnl_usd(
    steps: Sequence[GameStep], metrics: GameMetrics, final_pnl_usd: float | None
) -> float:
    """Return the profit in this window (USD): the last lifetime P&L minus that of the first step.

    Raises:
        RejectedError: the difference is no number, or exceeds ``MOST``.
    """
    known = (final_pnl_usd, metrics.final_pnl, steps[-1].environment_state.agent_pnl)
    last = next(value for value in known if value is not None)
    pnl = last - steps[0].environment_state.agent_pnl
    if not abs(pnl) <= MOST:
        raise RejectedError(Reason.NON_FINITE_NUMBER, f"finalPnL {last!r}: P&L is {pnl!r}")
    return pnl


def drawdown_usd(steps: Sequence[GameStep], pnl_usd: float) -> float:
    """Return the largest fall of the P&L (USD) from a peak, from the first step to the end.

    ``pnl_usd`` is the profit in this window: the path's end.

    Raises:
        RejectedError: the fall is no number, or exceeds ``MOST``.
    """
    start = steps[0].environment_state.agent_pnl
    path = [step.environment_state.agent_pnl for step in steps]
    path.append(start + pnl_usd)
    fall = max(peak - now for peak, now in zip(accumulate(path, max), path, strict=True))
    if not fall <= MOST:
        raise RejectedError(Reason.NON_FINITE_NUMBER, f"agentPnL falls by {fall!r}")
    return fall


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
    if not action.action_type.startswith(CLOSING) or not isinstance(action.result, dict):
        return None
    pnl = action.result.get("pnl")
    return pnl > 0 if isinstance(pnl, int | float) and not isinstance(pnl, bool) else None


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
    return sum(step.action.success and step.action.action_type != HOLD for step in steps)


def step_rewards(
    steps: Sequence[GameStep], outcomes: Outcomes, scenario_id: str
) -> tuple[StepReward, ...]:
    """Return the reward of each step whose trade is decided, in order."""
    if not outcomes:
        return ()
    rewards = []
    closed: set[str] = set()
    for step in reversed(steps):  # closing steps come before the trades that they close
        action = step.action
        market = market_of(action)
        if not action.success or market is None:
            continue
        if action.action_type.startswith(CLOSING):
            closed.add(market)
        elif market not in closed and action.action_type.startswith((*OPENING, DECISION)):
            reward = _prediction(step, outcomes.answer(scenario_id, market))
            reward = reward or _perpetual(step, outcomes.start_and_end(scenario_id, market))
            rewards += [reward] if reward else []
    return tuple(reversed(rewards))


def _prediction(step: GameStep, answer: str | None) -> StepReward | None:
    side = side_of(step.action)
    if answer is None or side not in ("YES", "NO"):
        return None
    shares, dollars = number_of(step.action, "shares"), number_of(step.action, "dollars")
    gain = shares / dollars - 1 if shares and dollars else 1.0
    return StepReward(
        step_number=step.step_number,
        prediction_correct=side == answer,
        reward=_clip(gain) if side == answer else -1.0,
    )


def _perpetual(step: GameStep, prices: tuple[float, float] | None) -> StepReward | None:
    sign = _SIDES.get(side_of(step.action))
    if prices is None or sign is None:
        return None
    entry = number_of(step.action, "entryPrice") or number_of(step.action, "price") or prices[0]
    change = sign * (prices[1] / entry - 1)
    if change == 0:
        return None
    return StepReward(
        step_number=step.step_number,
        perp_correct=change > 0,
        reward=_clip((number_of(step.action, "leverage") or 1.0) * change),
    )


def _clip(reward: float) -> float:
    return max(-1.0, min(1.0, reward))
