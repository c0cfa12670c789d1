"""Intervals of a mean for one look, and the width of a normal confidence sequence.

The gate's own sequences are in ``babylon.evaluation.arena.betting``. Live experiments, whose
outcomes have no bounds, use the asymptotic sequence of Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas
(2021), "Time-uniform central limit theory and asymptotic confidence sequences", arXiv 2103.06476,
Theorem 2.2. After t values of mean m and standard deviation s, with probability 1 - alpha for all
large t at once, the true mean lies in

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


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with the ends of its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


def mean_interval(values: ArrayLike, means: int = 1) -> Interval:
    """Return the normal interval of a mean: for a single look at dozens of values or more.

    ``means``: number of means of which this one was chosen. They share the error (Bonferroni).
    """
    array = np.asarray(values, float)
    return _around(array, NormalDist().inv_cdf(1 - ALPHA / 2 / means) / math.sqrt(len(array)))


def paired_difference(before: ArrayLike, after: ArrayLike, means: int = 1) -> Interval:
    """Return the interval of the mean of ``after - before``, for a single look."""
    return mean_interval(np.subtract(after, before), means)


def paired_sequence(before: ArrayLike, after: ArrayLike, budget: int) -> Interval:
    """Return the interval of the mean of ``after - before``, for all looks until ``budget``."""
    values = np.subtract(np.asarray(after, float), np.asarray(before, float))
    return _around(values, standard_errors(len(values) / budget) / math.sqrt(len(values)))


def standard_errors(progress: float) -> float:
    """Half-width of the sequence's interval, in standard errors, at ``progress`` t / t*."""
    scaled = progress * (-2 * math.log(ALPHA) + math.log(1 - 2 * math.log(ALPHA)))  # t rho²
    return math.sqrt(2 * (scaled + 1) / scaled * math.log(math.sqrt(scaled + 1) / ALPHA))


def unseen_share(plays: float) -> float:
    """Return the probability of an outcome that so many plays miss once in a hundred times.

    The rule of three at 99 % (Hanley and Lippman-Hand 1983, "If nothing goes wrong, is everything
    all right?").
    """
    return min(1.0, math.log(100) / plays)


def _around(values: NDArray[np.float64], width: float) -> Interval:
    """Return the interval of half-width ``width`` (in standard deviations) around the mean."""
    mean = float(values.mean())
    half = width * float(values.std(ddof=1)) if len(values) > 1 else math.inf  # one tells nothing
    return Interval(mean, mean - half, mean + half)
