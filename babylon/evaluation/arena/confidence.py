"""Confidence intervals of paired differences, for one look and for repeated looks.

Repeated looks at an ordinary 95 % interval, one after every batch, find a difference between equal
players in a quarter of all comparisons. A confidence sequence holds at all looks together:
Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas (2021), "Time-uniform central limit theory and
asymptotic confidence sequences", arXiv 2103.06476, Theorem 2.2. After t differences of mean m and
standard deviation s, with probability 1 - alpha for all large t at once, the true mean lies in

    m ± s sqrt( 2 (t rho² + 1) / (t² rho²) * log( sqrt(t rho² + 1) / alpha ) )

``rho`` decides where the sequence is tightest; for a time t* its appendix B.2 gives
``rho² = (-2 log alpha + log(-2 log alpha + 1)) / t*``.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

ALPHA = 0.05  # both sides together
_Z = NormalDist().inv_cdf(1 - ALPHA / 2)
_LUCK = NormalDist().inv_cdf(0.99)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with the ends of its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


def mean_interval(values: ArrayLike) -> Interval:
    """Return the normal interval of a mean: for a single look at dozens of values or more."""
    array = np.asarray(values, float)
    return _around(array, _Z / math.sqrt(len(array)))


def paired_difference(before: ArrayLike, after: ArrayLike) -> Interval:
    """Return the interval of the mean of ``after - before``, for a single look."""
    return mean_interval(np.subtract(after, before))


def confidence_sequence(differences: ArrayLike, tightest: float) -> Interval:
    """Return the confidence sequence's interval after the differences ``[t]``.

    It is valid after any number of earlier looks.

    Args:
        tightest: t*, the number of differences at which the sequence is tightest.
    """
    array = np.asarray(differences, float)
    return _around(array, _width(len(array), tightest))


def can_reach(differences: ArrayLike, tightest: float, budget: int) -> bool:
    """Return whether the sequence may still lie above zero after ``budget`` differences.

    False: not even the 99th percentile of the final mean, given the first t, is high enough
    (stochastic curtailment, Lan, Simon, Halperin 1982). The final mean's standard deviation around
    the current one is s sqrt(1/t - 1/budget). Stopping early this way never promotes.
    """
    array = np.asarray(differences, float)
    luck = _LUCK * math.sqrt(1 / len(array) - 1 / budget)
    deviations = luck - _width(budget, tightest)
    return float(array.mean()) + deviations * float(array.std(ddof=1)) > 0


def standard_errors(progress: float) -> float:
    """Half-width of the sequence's interval, in standard errors, at ``progress`` t / t*."""
    scaled = progress * (-2 * math.log(ALPHA) + math.log(1 - 2 * math.log(ALPHA)))  # t rho²
    return math.sqrt(2 * (scaled + 1) / scaled * math.log(math.sqrt(scaled + 1) / ALPHA))


def _width(t: int, tightest: float) -> float:
    """Half-width of the sequence's interval, in standard deviations of one value."""
    return standard_errors(t / tightest) / math.sqrt(t)


def _around(values: NDArray[np.float64], width: float) -> Interval:
    """Return the interval of half-width ``width`` (in standard deviations) around the mean."""
    mean = float(values.mean())
    half = width * float(values.std(ddof=1))
    return Interval(mean, mean - half, mean + half)
