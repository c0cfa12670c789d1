"""The default scorer: profit first, risk second. It needs no judge, no key and no network.

    value = pnl_usd - 0.25 * drawdown_usd - costs of failures
    score = (value - min) / (max - min) over the window's trajectories; 0.5 if all tie
    reward of a step = (its payoff - the cost of its failure) / (max - min)

The drawdown is the largest fall of the P&L from a peak inside the window, in USD. A quarter of it
orders equal profits by their risk, and rarely outweighs a difference in profit. Nothing else pays:
an agent that only posts, or that bets one dollar, scores like an agent that holds.

A malformed reply or refused action costs ``FAILURE_USD`` more than the largest loss of anyone's
step in its world at its tick. Otherwise it would be the best answer where all lose (decision 97).

One lucky trade must not make all others look equal. Of the distances to the median, the one that
nine of ten do not exceed is taken ``FAR`` times, at least ``LEAST_USD``. A value further away
counts as that far, and what its steps earned moves as much towards the mean step of the median.

Equal dollars differ by rounding, because P&L is a difference of lifetime sums. Values within
``TIE_USD`` therefore tie, and ``LEAST_USD`` takes the place of max - min in the rewards of steps.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from babylon.core.trajectories import Trajectory
from babylon.scoring.scorer import Score

RISK_WEIGHT = 0.25
FAILURE_USD = 10.0
USUAL, FAR = 0.9, 3.0  # of normally distributed values, one in a million is as far
LEAST_USD = 100.0  # where nearly all hold, a single trade is no outlier
TIE_USD = 1e-6  # above the rounding of lifetime sums of a billion, below any stake


def heuristic(trajectories: Sequence[Trajectory]) -> list[Score]:
    """Return one score in [0, 1] for each trajectory, with its profit and drawdown in USD."""
    costs = _failures(trajectories)
    worths = [
        own.pnl_usd - RISK_WEIGHT * own.drawdown_usd - sum(cost.values())
        for own, cost in zip(trajectories, costs, strict=True)
    ]
    middle = median(worths or [0.0])
    distances = [abs(worth - middle) for worth in worths]
    usual = sorted(distances)[int(USUAL * (len(worths) - 1))] if worths else 0.0
    limit = max(FAR * usual, LEAST_USD)
    shares = [min(1.0, limit / max(distance, LEAST_USD)) for distance in distances]
    values = [middle + share * (one - middle) for share, one in zip(shares, worths, strict=True)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    differ = high - low >= TIE_USD
    scale = high - low if differ else LEAST_USD
    return [
        Score(
            (value - low) / scale if differ else 0.5,
            {"pnl_usd": own.pnl_usd, "drawdown_usd": own.drawdown_usd},
            _rewards(own, cost, share / scale, (1 - share) * middle / scale),
        )
        for value, share, own, cost in zip(values, shares, trajectories, costs, strict=True)
    ]


def _rewards(own: Trajectory, cost: dict[int, float], part: float, rest: float) -> dict[int, float]:
    """Return step → ``part`` of what it earned and its share of the ``rest``."""
    each = rest / max(1, len(own.payoffs))
    return {p.step: part * (p.pnl_usd - cost.get(p.step, 0.0)) + each for p in own.payoffs}


def _failures(trajectories: Sequence[Trajectory]) -> list[dict[int, float]]:
    """Return step → cost of its failure in USD, for each trajectory."""
    lowest: dict[tuple[str, int], float] = defaultdict(float)
    for own in trajectories:
        for payoff in own.payoffs:
            moment = own.scenario_id, payoff.step
            lowest[moment] = min(lowest[moment], payoff.pnl_usd)
    return [
        {p.step: FAILURE_USD - lowest[own.scenario_id, p.step] for p in own.payoffs if p.failed}
        for own in trajectories
    ]
