"""A judge's answers to canaries (``babylon.scoring.judge.canaries``), and what they tell of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Literal

Kind = Literal["padded", "injected", "better", "worse", "swapped"]
COPIES: tuple[Kind, ...] = ("padded", "injected")
PLANTED: tuple[Kind, ...] = ("padded", "injected", "better", "worse")
KINDS: tuple[Kind, ...] = (*PLANTED, "swapped")


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    """The judge's answer to a canary.

    ``value`` of a copy is its gain in score over the original, right is 0. That of other kinds is
    in [-1, 1]: the share of right comparisons minus that of wrong ones.
    """

    kind: Kind
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryLine:
    """The mean of a kind's values, with its 95 % interval, and the value that is right."""

    kind: Kind
    count: int
    mean: float
    low: float
    high: float
    right: float


def compared(kind: Kind, score: float, others: Sequence[float]) -> CanaryResult:
    """Return the result of a better or worse play beside the scores of others."""
    signs = [(score > other) - (score < other) for other in others]
    return CanaryResult(kind=kind, value=fmean(signs) * (1 if kind == "better" else -1))


def swapped(first: Mapping[int, float], second: Mapping[int, float]) -> CanaryResult | None:
    """Return the agreement of two readings (item → score) in the order of each pair of items."""
    items = sorted(first.keys() & second.keys())
    signs = [
        _sign(first[a] - first[b]) * _sign(second[a] - second[b])
        for number, a in enumerate(items)
        for b in items[:number]
    ]
    return CanaryResult(kind="swapped", value=fmean(signs)) if signs else None


def _sign(difference: float) -> int:
    return (difference > 0) - (difference < 0)


def summarise_canaries(results: Sequence[CanaryResult]) -> list[CanaryLine]:
    """Return one line for each kind that has results."""
    lines = []
    for kind in KINDS:
        values = [one.value for one in results if one.kind == kind]
        if values:
            low, high = _interval(values, copies=kind in COPIES)
            lines.append(
                CanaryLine(
                    kind=kind,
                    count=len(values),
                    mean=fmean(values),
                    low=low,
                    high=high,
                    right=0.0 if kind in COPIES else 1.0,
                )
            )
    return lines


def _interval(values: Sequence[float], *, copies: bool) -> tuple[float, float]:
    """Return a 95 % interval of the mean of values in [-1, 1].

    Gains of copies are normal enough. Other values are mostly equal, so the sample's deviation
    would be too small: Wilson's interval takes the largest that the mean allows.
    """
    count, mean = len(values), fmean(values)
    if copies and count > 2:
        half = 1.96 * (1 + 1.5 / (count - 1)) * stdev(values) / sqrt(count)  # about Student's t
        return max(mean - half, -1.0), min(mean + half, 1.0)
    low, high = wilson(min(max((1 + mean) / 2, 0.0), 1.0), count)
    return 2 * low - 1, 2 * high - 1


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    z2 = 1.96**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    root = sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    half = 1.96 * root / (1 + z2 / count)
    return middle - half, middle + half


def prior_correlation(results: Sequence[CanaryResult], usual: float, variance: float) -> float:
    """Return the correlation with outcomes that canaries let expect, at most the ``usual`` one.

    Wrong comparisons lower it by their share. Gains of copies lower it as if half of the plays were
    padded or held demands. ``variance`` is that of opinions within a group.
    """
    answers = [one.value for one in results if one.kind not in COPIES]
    right = min(max((3 + sum(answers)) / (3 + len(answers)), 0.0), 1.0)
    gains = [one.value for one in results if one.kind in COPIES]
    bias = sum(gains) / (len(gains) + 3)
    return usual * right * sqrt(variance / (variance + bias**2 / 4)) if variance > 0 else 0.0
