"""Calibration: the scores of many requests become one score and interval for each trajectory.

A judge that scores lists is noisy, prefers some places in the list, and has no fixed scale: the
same trajectory gets different scores in different lists. The score s of trajectory i at place p of
request r is modelled as

    s = mean + theta_i + a_r + b(p) + noise,    noise ~ sigma t_8

theta_i ~ N(0, v_theta) is the trajectory's worth, a_r ~ N(0, v_a) the generosity of the request,
and b(p) the bias of the place: a slope along the list, plus offsets of the first and the last
place. The offsets have their own variance; otherwise the contrast of ends and middle would be as
uncertain as that of first and last. The noise is Student's t, because a judge misreads something
now and then (Lange, Little and Taylor 1989, "Robust statistical modeling using the t
distribution"). A score far from its fit is pulled towards it, so one misreading moves a worth
little. Eight degrees of freedom cost nothing measurable if the noise is normal. The model is a
ridge Plackett-Luce on scores instead of ranks: it compares within requests and links requests by
their shared trajectories.

The data determine the variances (Henderson's mixed model equations; MacKay's fixed point for the
variances, Neural Computation 4, 1992), so there is no ridge to choose. The judge's reliability,
v_theta / (v_theta + sigma2) (arXiv 2601.21817, for judges that compare pairs), decides how far
scores shrink towards each other and how wide the intervals are. If a judge never contradicts
itself, sigma2 falls to its floor and the intervals shrink to points.

People compare pairs. Their scores follow a Bradley-Terry model (Bradley and Terry 1952):

    P(i preferred to j, i shown first) = sigmoid(theta_i - theta_j + first)

The prior theta ~ N(0, v) acts as a ridge; EM estimates its variance v. ``first`` is the advantage
of the position shown first, and has a flat prior. Standard errors come from the quasi-likelihood
(McCullagh and Nelder 1989, ch. 9): the curvature times the dispersion of the residuals. People
who never contradict themselves leave residuals near zero. Guesses have dispersion one.
The fit is our own, because choix has no term for the order shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

Z = 0.674  # half width of a 50 % interval in standard errors
_ROUNDS = 60
_FLOOR = 1e-13  # least variance; judges write fewer digits than this
_LEAST_FREEDOM = 0.5  # least number of residuals that tell of the noise
_TAILS = 8.0  # degrees of freedom of the noise's distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreObservation:
    """One score of ``item`` in ``request`` at ``place`` (0 first, 1 last, 0.5 if alone)."""

    request: int
    item: int
    place: float
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Scores ``[N]`` in [0, 1] and their standard errors ``[N]``, by the judge's noise alone.

    ``reliability`` is the share of a single score's variance that the trajectory's worth explains.
    What the judge errs each time in the same way is part of the score here, and no part of the
    error: ``babylon.scoring.judge.validity`` adds it.
    """

    scores: Floats
    errors: Floats
    reliability: float

    @property
    def low(self) -> Floats:
        """Lower ends ``[N]`` of 50 % intervals."""
        return np.clip(self.scores - Z * self.errors, 0.0, 1.0)

    @property
    def high(self) -> Floats:
        """Upper ends ``[N]`` of 50 % intervals."""
        return np.clip(self.scores + Z * self.errors, 0.0, 1.0)


def calibrate(observations: Sequence[ScoreObservation], items: int, *, together: bool) -> Estimate:
    """Fit the model and return its estimate.

    ``together`` is True if requests showed several trajectories. Otherwise the model has neither
    a_r nor b(p).
    """
    fit = _Fit(observations, items, together)
    for _ in range(_ROUNDS):
        fit.step()
    scores = fit.mean_score + fit.worth
    # A score outside of [0, 1] rescales all, so that the order stays the same.
    floor, top = min(0.0, float(scores.min())), max(1.0, float(scores.max()))
    return Estimate(
        scores=(scores - floor) / (top - floor),
        errors=fit.errors / (top - floor),
        reliability=fit.reliability,
    )


class _Fit:
    """State of the fit: posterior mean and covariance of (theta, a, b), and variances.

    Each score shows one item, so the precision of theta is a diagonal D, and the posterior follows
    from the Schur complement of D: one small matrix of requests and places is inverted, and not the
    large one of the items. ``rest`` are the columns of requests and places.
    """

    def __init__(
        self, observations: Sequence[ScoreObservation], items: int, together: bool
    ) -> None:
        item = np.array([o.item for o in observations])
        request = np.array([o.request for o in observations])
        scores = np.array([o.score for o in observations])
        self.mean_score = float(scores.mean())
        self._y = scores - self.mean_score
        requests = int(request.max()) + 1
        spread = max(float(self._y.var()), _FLOOR)
        self._noise = spread / 4
        self._variances = [spread]
        rest = np.zeros((len(scores), 0))
        self._blocks = []
        if together:
            self._blocks = [slice(0, requests), slice(requests, requests + 1)]
            self._blocks.append(slice(requests + 1, requests + 3))
            self._variances += [spread / 50, spread / 10, spread / 100]
            places = _biases(np.array([o.place for o in observations]))
            rest = np.hstack([np.eye(requests)[request], places])
        self._item, self._rest = item, rest
        # Products of the design, which stay the same in every round.
        self._shown = np.bincount(item, minlength=items).astype(np.float64)
        self._cross = np.zeros((items, rest.shape[1]))
        np.add.at(self._cross, item, rest)
        self._gram = rest.T @ rest
        # D has one value for all items that were shown equally often.
        counts = np.unique(self._shown)
        self._overlaps = [
            (count, own.T @ own)
            for count in counts
            if (own := self._cross[self._shown == count]).size
        ]
        self._pulled = self._y
        self.worth = np.zeros(items)

    @property
    def reliability(self) -> float:
        noise = self._noise * _TAILS / (_TAILS - 2)  # its variance
        return self._variances[0] / (self._variances[0] + noise)

    @property
    def errors(self) -> Floats:
        """Standard errors ``[N]`` relative to the mean of all items.

        An item without a score counts by its prior, so a group that lost one is read more often.
        """
        # A score tells less than one of normal noise: by the ratio of Fisher's information.
        noise = self._noise * (_TAILS + 3) / (_TAILS + 1)
        own, linked, inner = self._posterior(noise)
        half, total = linked @ inner, linked.sum(axis=0)
        each = own + (half * linked).sum(axis=1) - 2 * (own + half @ total) / len(own)
        return _deviations(each + (own.sum() + total @ inner @ total) / len(own) ** 2)

    def step(self) -> None:
        """Run one round: the posterior given the variances, then the variances given that."""
        own, linked, inner = self._posterior(self._noise)
        items_y = np.bincount(self._item, weights=self._pulled, minlength=len(own))
        rest = inner @ (self._rest.T @ self._pulled - linked.T @ items_y) / self._noise
        self.worth = own * items_y / self._noise - linked @ rest
        doubt = [float(own.sum() + (self._overlap(2, self._noise) * inner).sum())]
        doubt += [float(np.diag(inner)[block].sum()) for block in self._blocks]
        means = [self.worth, *(rest[block] for block in self._blocks)]
        used = []
        for number, (mean, variance) in enumerate(zip(means, self._variances, strict=True)):
            size = len(mean)
            used.append(float(np.clip(size - doubt[number] / variance, 1e-3, size)))
            self._variances[number] = max(float((mean**2).sum()) / used[-1], _FLOOR)
        fitted = self.worth[self._item] + self._rest @ rest
        residual = self._y - fitted
        left = max(len(residual) - sum(used), _LEAST_FREEDOM)
        near = (_TAILS + 1) / (_TAILS + residual**2 / self._noise)
        self._noise = max(float(near @ residual**2) / left, _FLOOR)
        # The products of the design stay the same. Weights would change them in every round.
        self._pulled = fitted + near * residual

    def _posterior(self, noise: float) -> tuple[Floats, Floats, Floats]:
        """Return D^-1 ``[N]``, L = D^-1 X ``[N, R]`` and the covariance C of the rest ``[R, R]``.

        X are the products of items and rest. The covariance of theta is D^-1 + L C L^T.
        """
        own = 1 / (self._shown / noise + 1 / self._variances[0])
        cross = self._cross / noise
        linked = own[:, None] * cross
        prior = np.zeros(self._rest.shape[1])
        for block, variance in zip(self._blocks, self._variances[1:], strict=True):
            prior[block] = 1 / variance
        precision = self._gram / noise + np.diag(prior) - self._overlap(1, noise)
        inner = np.asarray(np.linalg.inv(precision), dtype=np.float64)
        return own, linked, inner

    def _overlap(self, power: int, noise: float) -> Floats:
        """Return X^T D^-power X ``[R, R]``."""
        total = np.zeros_like(self._gram)
        for count, overlap in self._overlaps:
            own = 1 / (count / noise + 1 / self._variances[0])
            total += own**power / noise**2 * overlap
        return total


def centred_errors(covariance: Floats) -> Floats:
    """Return standard errors ``[N]`` of each worth relative to the mean worth.

    The uncertainty of the mean itself does not affect the order, so it is left out.
    """
    return _deviations(np.diag(covariance) - 2 * covariance.mean(axis=0) + covariance.mean())


def _deviations(variances: Floats) -> Floats:
    result: Floats = np.sqrt(np.maximum(variances, 0.0))
    return result


def unstable(estimate: Estimate, items: Sequence[int] | None = None) -> list[int]:
    """Return those of the items whose order with a neighbour is in doubt, best first.

    Two neighbours are in doubt if their 95 % intervals overlap.
    """
    order = [int(item) for item in _best_first(estimate, items)]
    reach = 1.96 * estimate.errors
    overlapping = [
        estimate.scores[upper] - estimate.scores[lower] <= reach[upper] + reach[lower]
        for upper, lower in pairwise(order)
    ]
    above, below = [False, *overlapping], [*overlapping, False]
    return [item for item, a, b in zip(order, above, below, strict=True) if a or b]


def _best_first(estimate: Estimate, items: Sequence[int] | None) -> Indices:
    order = np.argsort(-estimate.scores, kind="stable")
    return order if items is None else order[np.isin(order, np.asarray(items, dtype=np.intp))]


def _biases(place: Floats) -> Floats:
    """Return columns ``[observations, 3]``: slope along the list, first place, last place."""
    return np.stack([0.5 - place, place == 0.0, place == 1.0], axis=1).astype(float)


Win = tuple[int, int, bool]
"""Winner, loser, and whether the winner was shown first."""

_FIRST_VARIANCE = 1000.0
_VARIANCES = (0.05, 1000.0)
_MIN_DISPERSION = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preferences:
    """``worth`` ``[N]``; its covariance with the advantage of being first ``[N + 1, N + 1]``."""

    worth: Floats
    covariance: Floats
    dispersion: float


def fit_preferences(wins: Sequence[Win], items: int) -> Estimate:
    """Return scores: the probability of being preferred to a random other trajectory.

    The probability leaves out the advantage of being shown first.
    """
    fit = _fit_preferences(wins, items)
    errors = centred_errors(fit.covariance[:items, :items]) * np.sqrt(fit.dispersion)
    low = _against_others(fit.worth - errors, fit.worth)
    return Estimate(
        scores=_against_others(fit.worth, fit.worth),
        errors=(_against_others(fit.worth + errors, fit.worth) - low) / 2,
        reliability=max(0.0, 1 - min(1.0, fit.dispersion)),
    )


def _fit_preferences(wins: Sequence[Win], items: int) -> _Preferences:
    first = np.array([winner if ahead else loser for winner, loser, ahead in wins], dtype=np.intp)
    second = np.array([loser if ahead else winner for winner, loser, ahead in wins], dtype=np.intp)
    outcome = np.array([ahead for *_, ahead in wins], dtype=np.float64)
    theta, variance = np.zeros(items + 1), 1.0
    for _ in range(_ROUNDS):
        prior = np.append(np.full(items, 1 / variance), 1 / _FIRST_VARIANCE)
        chance = _sigmoid(theta[first] - theta[second] + theta[items])
        precision = _curvature(first, second, chance * (1 - chance), items) + np.diag(prior)
        covariance = np.asarray(np.linalg.inv(precision), dtype=np.float64)
        missed = outcome - chance
        slope = _sums(first, missed, items + 1) - _sums(second, missed, items + 1)
        slope[items] = missed.sum()
        theta = theta + np.clip(covariance @ (slope - prior * theta), -2.0, 2.0)
        squares = theta[:items] ** 2 + np.diag(covariance)[:items]
        variance = float(np.clip(squares.mean(), *_VARIANCES))
    chance = _sigmoid(theta[first] - theta[second] + theta[items])
    pair = _pair_variance(covariance)[first, second]
    return _Preferences(
        worth=theta[:items],
        covariance=covariance,
        dispersion=_dispersion(outcome, chance, pair),
    )


def _curvature(first: Indices, second: Indices, weight: Floats, items: int) -> Floats:
    """Return the sum ``[N + 1, N + 1]`` of the comparisons' information.

    A comparison has +1 for the item shown first, -1 for the other, and +1 for being first.
    """
    size = items + 1
    pairs = _sums(first * size + second, weight, size * size).reshape(size, size)
    once, again = _sums(first, weight, size), _sums(second, weight, size)
    result: Floats = np.diag(once + again) - pairs - pairs.T
    result[items, :] = result[:, items] = once - again
    result[items, items] = weight.sum()
    return result


def _sums(at: Indices, weight: Floats, size: int) -> Floats:
    return np.bincount(at, weight, size).astype(np.float64)


def _pair_variance(covariance: Floats) -> Floats:
    """Return the variance ``[N, N]`` of the log odds of i against j, i shown first."""
    own, side, first = covariance[:-1, :-1], covariance[:-1, -1], covariance[-1, -1]
    spread = np.diag(own)[:, None] + np.diag(own)[None, :] - 2 * own
    result: Floats = first + spread + 2 * (side[:, None] - side[None, :])
    return result


def _dispersion(outcome: Floats, chance: Floats, pair: Floats) -> float:
    """Return Pearson's statistic over the remaining degrees of freedom, clipped to [1e-4, 1]."""
    weight = np.maximum(chance * (1 - chance), 1e-9)
    used = float((weight * pair).sum())
    pearson = float(((outcome - chance) ** 2 / weight).sum())
    return min(1.0, max(pearson / max(len(outcome) - used, 1.0), _MIN_DISPERSION))


def _against_others(worth: Floats, field: Floats) -> Floats:
    """Return the mean probability ``[N]`` that each worth beats the others of the field."""
    chances = _sigmoid(worth[:, None] - field[None, :])
    own = np.diag(chances)
    result: Floats = (chances.sum(axis=1) - own) / max(len(field) - 1, 1)
    return result


def _sigmoid(x: Floats) -> Floats:
    result: Floats = 0.5 * (1 + np.tanh(x / 2))
    return result
