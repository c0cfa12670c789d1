"""May the challenger replace the champion? A paired comparison on the same unseen scenarios."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

_Z = NormalDist().inv_cdf(0.975)
MAX_EXTRA_MALFORMED = 0.02  # share of replies


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean of paired differences with its two-sided 95 % normal interval."""

    mean: float
    low: float
    high: float


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Interval:
    """``after - before``, scenario by scenario (some dozens)."""
    differences = [new - old for old, new in zip(before, after, strict=True)]
    mean = fmean(differences)
    half = _Z * stdev(differences) / math.sqrt(len(differences))
    return Interval(mean, mean - half, mean + half)


def decide(
    difference: Interval, malformed_before: float, malformed_after: float, margin_usd: float
) -> tuple[bool, str]:
    """(promote?, reason with the numbers).

    The challenger passes when it did not play worse on average, a loss of more than ``margin_usd``
    a scenario is ruled out with 97.5 % confidence, and it does not write notably more malformed
    replies. Without the first condition small losses, each within the margin, would add up over
    the hours.
    """
    interval = f"{difference.mean:+.1f} [{difference.low:+.1f}, {difference.high:+.1f}]"
    if malformed_after > malformed_before + MAX_EXTRA_MALFORMED:
        return False, (
            f"malformed replies rose from {malformed_before:.1%} to {malformed_after:.1%},"
            f" allowed is {MAX_EXTRA_MALFORMED:.0%} more"
        )
    if difference.mean < 0:
        return False, f"P&L difference {interval}: worse than the champion on average"
    if difference.low < -margin_usd:
        return False, (
            f"P&L difference {interval} does not rule out a loss of {margin_usd:g} a scenario"
        )
    return True, f"P&L difference {interval} rules out a loss of {margin_usd:g} a scenario"
