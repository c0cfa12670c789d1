"""Is one player better than another? Intervals of paired differences, for one look and for many.

Looking after every batch at an ordinary 95 % interval finds a difference where there is none in a
quarter of all comparisons. A confidence sequence holds at all looks together:
Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas (2021), "Time-uniform central limit theory and
asymptotic confidence sequences", arXiv 2103.06476, Theorem 2.2. After t differences of mean m and
standard deviation s, with probability 1 - alpha at every t at once (as t grows), the truth lies in

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
    """A mean of paired differences with the ends of its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


def mean_interval(values: ArrayLike) -> Interval:
    """The normal interval of a mean, for a single look at some dozens of values or more."""
    array = np.asarray(values, float)
    return _around(array, _Z / math.sqrt(len(array)))


def paired_difference(before: ArrayLike, after: ArrayLike) -> Interval:
    """``after - before``, scenario by scenario, for a single look."""
    return mean_interval(np.subtract(after, before))


def confidence_sequence(differences: ArrayLike, tightest: float) -> Interval:
    """The sequence's interval after these differences ``[t]``, however often one looked before.

    Args:
        tightest: t*, the number of differences at which it is to be tightest.
    """
    array = np.asarray(differences, float)
    return _around(array, _width(len(array), tightest))


def can_reach(differences: ArrayLike, tightest: float, budget: int) -> bool:
    """Could the sequence still lie above zero after ``budget`` differences?

    False when even a mean of the rest that is luckier than in 99 % of all cases would not do:
    the mean of all is that of the first t within s sqrt(1/t - 1/budget), one standard deviation
    (stochastic curtailment, as of Lan, Simon, Halperin 1982). Ending there promotes nobody.
    """
    array = np.asarray(differences, float)
    luck = _LUCK * math.sqrt(1 / len(array) - 1 / budget)
    deviations = luck - _width(budget, tightest)
    return float(array.mean()) + deviations * float(array.std(ddof=1)) > 0


def standard_errors(progress: float) -> float:
    """Half of the sequence's interval, in standard errors of its centre, at ``progress`` t / t*."""
    scaled = progress * (-2 * math.log(ALPHA) + math.log(1 - 2 * math.log(ALPHA)))  # t rho²
    return math.sqrt(2 * (scaled + 1) / scaled * math.log(math.sqrt(scaled + 1) / ALPHA))


def _width(t: int, tightest: float) -> float:
    """Half of the sequence's interval, in standard deviations of one value."""
    return standard_errors(t / tightest) / math.sqrt(t)


def _around(values: NDArray[np.float64], width: float) -> Interval:
    """``width``: half of the interval, in standard deviations of one value."""
    mean = float(values.mean())
    half = width * float(values.std(ddof=1))
    return Interval(mean, mean - half, mean + half)
