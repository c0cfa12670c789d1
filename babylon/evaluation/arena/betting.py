"""Confidence sequences of bounded paired differences, by betting.

Source: Waudby-Smith and Ramdas (2024), "Estimating means of bounded random variables by betting",
JRSS B 86(1), arXiv 2010.09686. A gambler bets that the mean of the differences D is above m. Its
wealth after t worlds is

    W_t(m) = sum_k w_k prod_{i <= t} ( 1 + min(lambda_ik, c / (m + loss_i)) (D_i - m) )

``loss_i`` bounds the fall in world i: D_i >= -loss_i. It is known before the world is played, so no
factor is negative. If the mean is m or below, W is a nonnegative supermartingale that begins at 1,
and it ever reaches 1/alpha with probability alpha at most (Ville 1939). This holds for every
distribution within the bounds, at any number of looks, also for rare losses that nobody has seen
yet. W falls in m, so the m below which W stays under 1/alpha are an interval's lower end.

Departures from the paper: three gamblers share the capital, with bets that are best after a
sixteenth, a quarter and all of the budget (its equation 26 with these sample sizes); bets are
capped by each world's own bound. ``loss`` need not be an upper bound of the gains: gains beyond
``gain_i`` count as ``gain_i``, which can only lower W. A loss beyond ``loss_i`` ends W at 0.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from babylon.evaluation.arena.confidence import Interval, unseen_share

Floats = NDArray[np.float64]
ALPHA = 0.025  # one side
CERTAIN = -math.log(ALPHA)  # log wealth at which a gambler is believed
_CAP = 0.9  # c: largest share of the capital that one world can cost
_HORIZONS = (1, 4, 16)  # a gambler's sample size is the budget over one of these
_CAPITAL = np.log((0.6, 0.25, 0.15))[:, None]
_PRIOR = 8.0  # before the first world, the standard deviation is this share of the largest loss
_STEPS = 30  # of a bisection
_ROUNDING = 1e-6  # dollars
_FEWEST = 32  # differences whose deviation can be extrapolated


@dataclass(frozen=True, slots=True, eq=False)
class Differences:
    """Paired differences ``[..., n]`` of n worlds, with their bounds.

    ``loss`` and ``gain`` ``[..., n]`` are positive: ``-loss <= values <= gain`` in each world.
    ``weight`` ``[..., n]``, at most 1, makes the bets on a world smaller: older worlds count less.
    """

    values: Floats
    loss: Floats
    gain: Floats
    weight: Floats | None = None

    @property
    def reversed(self) -> "Differences":
        return Differences(-self.values, self.gain, self.loss, self.weight)

    def first(self, count: int) -> "Differences":
        weight = None if self.weight is None else self.weight[..., :count]
        return Differences(
            self.values[..., :count], self.loss[..., :count], self.gain[..., :count], weight
        )


def log_wealth(differences: Differences, budget: int, mean: float = 0.0) -> Floats:
    """Return the log wealth ``[..., n]`` after each world of betting on a mean above ``mean``."""
    values = np.clip(differences.values, -differences.loss, differences.gain)
    stakes = _stakes(values, differences.loss, budget)
    if differences.weight is not None:
        stakes = stakes * differences.weight[..., None, :]
    room = np.maximum(differences.loss + mean, 1e-9)[..., None, :]
    bets = np.minimum(stakes, _CAP / room)
    factors = np.log1p(bets * (values - mean)[..., None, :])
    # A loss beyond its bound shows that the bound is wrong: such a gambler is never believed.
    broken = differences.values < -differences.loss - _ROUNDING
    factors = np.where(broken[..., None, :], -np.inf, factors)
    totals: Floats = np.logaddexp.reduce(np.cumsum(factors, axis=-1) + _CAPITAL, axis=-2)
    return totals


def _stakes(values: Floats, loss: Floats, budget: int) -> Floats:
    """Return lambda ``[..., 3, n]``: sqrt(2 log(1/alpha) / (horizon variance)).

    The variance of a world's bet is that of the worlds before it, with the prior as one of them.
    """
    count = np.arange(1, values.shape[-1] + 1)
    sums, squares = np.cumsum(values, axis=-1), np.cumsum(values**2, axis=-1)
    spread = squares - sums**2 / count
    prior = (loss[..., :1] / _PRIOR) ** 2
    before = np.concatenate([np.zeros_like(prior), spread[..., :-1]], axis=-1)
    variance = np.maximum((prior + before) / count, 1e-12)
    horizons = np.array([budget / h for h in _HORIZONS])[:, None]
    stakes: Floats = np.sqrt(2 * CERTAIN / (horizons * variance[..., None, :]))
    return stakes


def sequence(differences: Differences, budget: int) -> Interval:
    """Return mean and 95 % confidence sequence of the differences ``[n]``; both ends at 97.5 %."""
    low = _lowest(differences, budget)
    high = -_lowest(differences.reversed, budget)
    return Interval(float(differences.values.mean()), low, high)


def _lowest(differences: Differences, budget: int) -> float:
    """Return the largest mean that betting above it refutes, by bisection."""
    low, high = -float(differences.loss.max()), float(differences.values.mean())
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if log_wealth(differences, budget, middle)[-1] >= CERTAIN:
            low = middle
        else:
            high = middle
    return low


def can_reach(differences: Differences, budget: int) -> bool:
    """Return whether a gambler may still be believed after ``budget`` differences.

    False: not even if the mean of the rest is at the 99th percentile, given the first t
    (stochastic curtailment, Lan, Simon, Halperin 1982), and the rest has the rare gains that t
    differences miss once in a hundred times (the rule of three). Stopping early never promotes.
    """
    values = differences.values
    t = len(values)
    if t >= budget or t < _FEWEST:
        return t < budget
    variance = float(values.var(ddof=1))
    mean = float(values.mean()) + 2.326 * math.sqrt(variance * (1 / t - 1 / budget))
    gain, rare = float(differences.gain.mean()), unseen_share(t) * (1 - t / budget)
    mean, variance = mean + rare * gain, variance + rare * gain**2
    best = min(_CAP / float(differences.loss.mean()), mean / variance)
    growth = best * mean - best**2 * variance / 2
    return mean > 0 and budget * growth > CERTAIN
