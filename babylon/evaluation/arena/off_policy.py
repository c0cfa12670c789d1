"""Off-policy estimate of the challenger's P&L from other players' trajectories.

The method is weighted (self-normalised) importance sampling per trajectory (Precup, Sutton, Singh
2000, "Eligibility traces for off-policy policy evaluation", section 3): a trajectory's weight is
its probability under the challenger over that under its player. Its P&L is taken relative to the
mean of the others in its scenario, so that easy markets do not count. Weights are truncated at
sqrt(n) times their mean (Ionides 2008, "Truncated importance sampling"), which bounds the variance
at the cost of a small bias. The effective sample size is ``ess = (sum w)² / sum w²`` (Kong 1992);
below ``MIN_ESS`` there is no estimate.
"""

from collections.abc import Sequence

import numpy as np

from babylon.core.types import OffPolicy
from babylon.evaluation.arena.play import Floats

MIN_ESS = 30.0  # trajectories; below, the mean's interval is not normal
_Z = 2.576  # 99 %: the check can veto, so it must be nearly certain


def off_policy(log_ratios: Floats, pnl_usd: Floats, scenarios: Sequence[str]) -> OffPolicy:
    """Estimate the challenger's P&L minus the players', from n trajectories.

    Args:
        log_ratios: ``[n]`` log of the probability under the challenger over that under the player.
        pnl_usd: ``[n]`` each trajectory's P&L.
        scenarios: ``[n]`` each trajectory's scenario; one alone in its scenario is ignored.
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
        problem = f"too small: ESS {ess:.1f} of {n} held-out trajectories; {MIN_ESS:g} needed"
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
