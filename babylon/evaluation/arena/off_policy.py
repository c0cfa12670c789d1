"""What would the challenger have earned where others played? Weighted importance sampling.

A trajectory counts as often as the challenger would have played it more than its player did:
weighted (self-normalised) importance sampling, per trajectory (Precup, Sutton, Singh 2000,
"Eligibility traces for off-policy policy evaluation", section 3). What it earned is taken above
the mean of the others in its scenario, so that an easy market is nobody's merit. Weights are cut
at sqrt(n) times their mean (Ionides 2008, "Truncated importance sampling"), a little bias for a
bounded variance. ``ess = (sum w)² / sum w²`` (Kong 1992) of the n trajectories says how much is
left; with too little the estimate is refused.
"""

from collections.abc import Sequence

import numpy as np

from babylon.core.types import OffPolicy
from babylon.evaluation.arena.play import Floats

MIN_ESS = 30.0  # trajectories, as for any mean whose interval is to be normal
_Z = 2.576  # 99 %: a veto is to be beyond doubt


def off_policy(log_ratios: Floats, pnl_usd: Floats, scenarios: Sequence[str]) -> OffPolicy:
    """The challenger's P&L above the players', from n trajectories.

    Args:
        log_ratios: ``[n]`` log of the probability under the challenger over that of its player.
        pnl_usd: ``[n]`` what each earned.
        scenarios: ``[n]`` where; a trajectory that is alone in its scenario says nothing.
    """
    _, index, count = np.unique(scenarios, return_inverse=True, return_counts=True)
    size, total = count[index], np.bincount(index, pnl_usd)[index]
    compared = size > 1
    n = int(compared.sum())
    if n == 0:
        return OffPolicy(problem="too small: no two held-out trajectories share a scenario")
    others = (total - pnl_usd)[compared] / (size[compared] - 1)
    earned = pnl_usd[compared] - others
    weights = np.exp(log_ratios[compared] - log_ratios[compared].max())
    weights = np.minimum(weights, np.sqrt(n) * weights.mean())
    weights /= weights.sum()
    ess = float(1 / (weights**2).sum())
    if ess < MIN_ESS:
        problem = f"too small: ESS {ess:.1f} of {n} held-out trajectories, needed is {MIN_ESS:g}"
        return OffPolicy(trajectories=n, ess=ess, problem=problem)
    difference = float(weights @ earned)
    half = _Z * float(np.sqrt(((weights * (earned - difference)) ** 2).sum()))
    return OffPolicy(
        trajectories=n,
        ess=ess,
        difference=difference,
        low=difference - half,
        high=difference + half,
    )
