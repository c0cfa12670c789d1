"""Validity: the judge's opinions beside the outcomes that came true.

Repetition shows only the noise of a judge, not an error that it makes each time in the same way.
That error is learned from groups judged before, whose outcomes are known. For the trajectories of
one group, with centred values:

    truth t,   opinion u = t + e,   estimate s of u with the standard error of the noise

    validity    k = var(t) / (var(t) + var(e)) = corr(s, outcome)^2 / reliability of s
    score       E[t | s] = k s
    variance    k^2 error^2 + k (1 - k) var(u)

The correlation is pooled within groups and shrunk towards a prior, so that a judge without a
history is neither trusted fully nor distrusted. The interval's width is multiplied by a factor
such that 50 % intervals would have held 50 % of the earlier outcomes (split conformal prediction,
Papadopoulos et al. 2002). It corrects for tails that no normal distribution has.

**Evidence.** An uninformed judge agrees with outcomes by chance. Then all orders of a
group's outcomes are equally likely, and

    e = exp(a (n - 1) r) / mean over permutations of exp(a (n - 1) r')

has expectation one (an e-value for group invariance, arXiv 2310.01153), with r the group's
correlation. So does the product over groups, and the mean over several a. The product over all
windows so far is a martingale: by Ville's inequality an uninformed judge ever reaches 20 with a
probability of at most 5 %. A judge that was informed once must still be: the product over the last
windows counts too. Groups whose outcomes are equal count nothing. Only if no group has outcomes,
planted plays are the evidence instead. A coin decides whether a planted play is better or worse
than all others. The answer v in [-1, 1] of a judge that cannot tell which has mean zero, whatever
its taste, and 1 + b v is an e-value for each b (testing by betting, Shafer 2021).

**Prior.** Before there are outcomes, canaries tell how far a judge can be trusted
(``babylon.scoring.judge.canary_results``). They lower the correlation that is expected of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import atanh, sqrt, tanh
from zlib import crc32

import numpy as np

from babylon.core.errors import WindowNotReadyError
from babylon.scoring.judge.calibrate import Estimate, Floats, Z
from babylon.scoring.judge.canary_results import CanaryResult, prior_correlation

WINDOWS = 30  # of history: enough for 50 % intervals, and few enough to notice a changed judge
_PRIOR_CORRELATION, _PRIOR_TRAJECTORIES = 0.8, 6
_USUAL_VARIANCE = 0.04  # of a judge's opinions within a group
_PRIOR_WIDTHS = 10  # trajectories that speak for normal errors
_MOST_VALID = 0.999
_STAKES = (0.1, 0.3, 1.0)  # a: for weak and for strong agreement
_BETS = (0.2, 0.5, 0.9)  # b: the same for planted plays
_PERMUTATIONS = 199
_LEAST_SPREAD = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedGroup:
    """A judged group beside its outcomes, in the same order ``[n]``.

    ``opinions`` are the judge's scores before any correction, ``errors`` their standard errors by
    noise. ``outcomes`` are realised P&L in US dollars. ``spread_usd`` is the standard deviation of
    the outcomes of all plays of the group, lost ones included (0: of ``outcomes``): the judge's
    scale does not follow the plays that are left. It and ``trajectory_ids`` are missing in rows of
    earlier versions.
    """

    opinions: tuple[float, ...]
    errors: tuple[float, ...]
    outcomes: tuple[float, ...]
    trajectory_ids: tuple[str, ...] = ()
    spread_usd: float = 0.0


class UnprovenJudgeError(WindowNotReadyError):
    """The judge has not shown that its scores are better than chance.

    The window waits. Its judgments are stored; a later run takes it up when other windows have
    proved the judge.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """The ``validity`` k of a judge in [0, 1], and the factor ``width`` of its intervals."""

    validity: float
    width: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Correlation of opinions with outcomes within groups, with its 95 % interval."""

    correlation: float
    low: float
    high: float
    trajectories: int


def believe(estimate: Estimate, trust: Trust, items: Sequence[int]) -> tuple[Floats, Floats]:
    """Return posterior means ``[N]`` and half widths ``[N]`` of 50 % intervals.

    ``items`` are the trajectories that were judged; only they count for the group's mean.
    """
    k, known = trust.validity, list(items)
    centre = estimate.scores[known].mean()
    variance = _variance(estimate.scores[known], estimate.errors[known])
    scores = centre + k * (estimate.scores - centre)
    deviations = np.sqrt(k**2 * estimate.errors**2 + k * (1 - k) * variance)
    return scores, Z * trust.width * deviations


def learn(groups: Sequence[JudgedGroup], canaries: Sequence[CanaryResult] = ()) -> Trust:
    """Return the trust that earlier groups and the judge's answers to canaries justify."""
    pairs = [pair for group in groups if (pair := _pair(group)) is not None]
    crossed = sum(float(s @ z) for s, z, _ in pairs)
    spread = sqrt(sum(float(s @ s) for s, *_ in pairs) * sum(float(z @ z) for _, z, _ in pairs))
    count = sum(len(s) for s, *_ in pairs)
    found = crossed / spread if spread > _LEAST_SPREAD else 0.0
    spreads = [np.var(group.opinions) for group in groups if len(group.opinions) > 1]
    variance = float(np.mean(spreads)) if spreads else _USUAL_VARIANCE
    expected = prior_correlation(canaries, _PRIOR_CORRELATION, variance)
    weight = count / (count + _PRIOR_TRAJECTORIES + len(canaries))
    correlation = weight * found + (1 - weight) * expected
    reliability = 1.0
    if pairs:
        own = sum(float(s @ s) for s, *_ in pairs)
        noise = sum(float(e @ e) for *_, e in pairs)
        reliability = own / (own + noise) if own > 0 else 1.0
    validity = min(max(correlation, 0.0) ** 2 / max(reliability, 0.05), _MOST_VALID)
    # The outcomes' unit is the slope of opinions on them, corrected for the shrinkage of estimates.
    squares = sum(float(z @ z) for _, z, _ in pairs)
    unit = crossed / max(squares * reliability, 1e-12)
    return Trust(validity=validity, width=_width(pairs, validity, unit))


def _width(pairs: Sequence[tuple[Floats, Floats, Floats]], k: float, unit: float) -> float:
    """Return the factor by which intervals would have held half of the outcomes."""
    if not pairs or not k > 0:
        return 1.0
    ratios = []
    for s, z, e in pairs:
        deviations = np.sqrt(k**2 * e**2 + k * (1 - k) * (float(s @ s + e @ e) / len(s)))
        ratios.append(np.abs(unit * z - k * s) / np.maximum(deviations, 1e-6))
    every = np.concatenate(ratios)
    weight = len(every) / (len(every) + _PRIOR_WIDTHS)
    return float(weight * np.median(every) / Z + 1 - weight)


def agreement(groups: Sequence[JudgedGroup]) -> Agreement | None:
    """Return the agreement of opinions with outcomes, ``None`` if no group can show any."""
    pairs = [pair for group in groups if (pair := _pair(group)) is not None]
    free = sum(len(s) - 1 for s, *_ in pairs)
    if free < 3:
        return None
    units = [(s / max(float(np.linalg.norm(s)), 1e-12), z, len(s)) for s, z, _ in pairs]
    total = sum(float(s @ (z / np.linalg.norm(z))) * (n - 1) for s, z, n in units)
    found = max(min(total / free, 1 - 1e-9), -1 + 1e-9)
    half = 1.96 / sqrt(free - 2)
    return Agreement(
        correlation=found,
        low=tanh(atanh(found) - half),
        high=tanh(atanh(found) + half),
        trajectories=sum(len(s) for s, *_ in pairs),
    )


def evidence(groups: Sequence[JudgedGroup], canaries: Sequence[CanaryResult]) -> float:
    """Return the e-value of these groups against an uninformed judge. 1 means no evidence."""
    found = log_evidence(groups) if has_outcomes(groups) else log_canaries(canaries)
    return _mixed(np.asarray(found))


def log_evidence(groups: Sequence[JudgedGroup]) -> tuple[float, ...]:
    """Return the logarithm of the groups' e-value for each stake, by outcomes alone."""
    products = np.zeros(len(_STAKES))
    for group in groups:
        if (pair := _pair(group)) is not None:
            products += _log_e(pair[0], pair[1])
    return tuple(float(one) for one in products)


def log_canaries(canaries: Sequence[CanaryResult]) -> tuple[float, ...]:
    """Return the logarithm of the e-value of answers to planted plays, for each bet."""
    answers = np.array([one.value for one in canaries if one.kind in ("better", "worse")])
    return tuple(float(one) for one in np.log1p(np.outer(_BETS, answers)).sum(axis=1))


def most_evidence(windows: Sequence[Sequence[float]]) -> float:
    """Return the largest value that the martingale reached after any window, the oldest first.

    ``windows`` are their ``log_evidence`` or ``log_canaries``.
    """
    if not windows:
        return 1.0
    paths = np.cumsum(np.asarray(windows, dtype=np.float64), axis=0)
    return max(_mixed(path) for path in paths)


def has_outcomes(groups: Sequence[JudgedGroup]) -> bool:
    """Return True if the outcomes of any group differ."""
    return any(_pair(group) is not None for group in groups)


def _mixed(logs: Floats) -> float:
    return float(np.exp(np.minimum(logs, 700.0)).mean())


def _log_e(one: Floats, other: Floats) -> Floats:
    """Return the logarithm of a group's e-value, for each of the stakes."""
    scale = float(np.linalg.norm(one) * np.linalg.norm(other))
    if scale < _LEAST_SPREAD:
        return np.zeros(len(_STAKES))
    random = np.random.default_rng(crc32(other.tobytes()))  # a group's value is always the same
    orders = np.argsort(random.random((_PERMUTATIONS, len(other))), axis=1)
    correlations = np.append(other[orders] @ one, other @ one) / scale
    logs = np.outer(_STAKES, (len(one) - 1) * correlations)
    top = logs.max(axis=1)
    means = top + np.log(np.exp(logs - top[:, None]).mean(axis=1))
    result: Floats = logs[:, -1] - means
    return result


def _pair(group: JudgedGroup) -> tuple[Floats, Floats, Floats] | None:
    """Return centred opinions, outcomes in standard units, and errors. ``None``: all are equal."""
    outcomes = np.asarray(group.outcomes, dtype=np.float64)
    if len(outcomes) < 2 or float(outcomes.std()) < _LEAST_SPREAD:
        return None
    opinions = np.asarray(group.opinions, dtype=np.float64)
    outcomes = (outcomes - outcomes.mean()) / (group.spread_usd or float(outcomes.std()))
    return opinions - opinions.mean(), outcomes, np.asarray(group.errors, dtype=np.float64)


def _variance(scores: Floats, errors: Floats) -> float:
    """Return the variance of opinions: that of their estimates, and that of their errors."""
    return float(scores.var() + (errors**2).mean())
