"""Calibration: the scores of many requests become one score and interval for each trajectory.

A judge that scores lists is noisy, prefers some places in the list, and has no fixed scale: the
same trajectory gets different scores in different lists. The score s of trajectory i at place p of
request r is modelled as

    s = mean + theta_i + a_r + b(p) + noise,    noise ~ N(0, sigma2)

theta_i ~ N(0, v_theta) is the trajectory's worth, a_r ~ N(0, v_a) the generosity of the request,
and b(p) the bias of the place: a slope along the list, plus offsets of the first and the last
place. The offsets have their own variance; otherwise the contrast of ends and middle would be as
uncertain as that of first and last. The model is a ridge Plackett-Luce on scores instead of ranks:
it compares within requests and links requests by their shared trajectories.

The data determine the variances (Henderson's mixed model equations; MacKay's fixed point for the
variances, Neural Computation 4, 1992), so there is no ridge to choose. The judge's reliability,
v_theta / (v_theta + sigma2) (arXiv 2601.21817, for judges that compare pairs), decides how far
scores shrink towards each other and how wide the intervals are. If a judge never contradicts
itself, sigma2 falls to its floor and the intervals shrink to points.

Scores from pairwise preferences follow a Bradley-Terry model (Bradley and Terry 1952):

    P(i preferred to j, i shown first) = sigmoid(theta_i - theta_j + first)

The prior theta ~ N(0, v) acts as a ridge; EM estimates its variance v. ``first`` is the advantage
of the position shown first, and has a flat prior. Standard errors come from the quasi-likelihood
(McCullagh and Nelder 1989, ch. 9): the curvature times the dispersion of the residuals. A judge
that never contradicts itself leaves residuals near zero. A judge that guesses has dispersion one.
The fit is our own, because choix has no term for the order shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

Z = 0.674  # half width of a 50 % interval in standard errors
_ROUNDS = 60
_FLOOR = 1e-13  # least variance; judges write fewer digits than this
_LEAST_FREEDOM = 0.5  # least degrees of freedom of the noise


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreObservation:
    """One score of ``item`` in ``request`` at ``place`` (0 first, 1 last, 0.5 if alone)."""

    request: int
    item: int
    place: float
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Scores ``[N]`` in [0, 1], the ends of their intervals ``[N]``, and the judge's reliability.

    ``reliability`` is the share of a single score's variance that the trajectory's worth explains.
    """

    scores: Floats
    low: Floats
    high: Floats
    reliability: float


def calibrate(observations: Sequence[ScoreObservation], items: int, *, together: bool) -> Estimate:
    """Fit the model and return its estimate.

    ``together`` is True if requests showed several trajectories. Otherwise the model has neither
    a_r nor b(p).
    """
    fit = _Fit(observations, items, together)
    for _ in range(_ROUNDS):
        fit.step()
    return _within_unit(fit.mean_score + fit.worth, Z * fit.errors, fit.reliability)


def _within_unit(scores: Floats, half: Floats, reliability: float) -> Estimate:
    """Rescale scores to [0, 1] if any lies outside. The order stays the same."""
    floor, top = min(0.0, float(scores.min())), max(1.0, float(scores.max()))
    scores, half = (scores - floor) / (top - floor), half / (top - floor)
    return Estimate(
        scores=scores,
        low=np.clip(scores - half, 0.0, 1.0),
        high=np.clip(scores + half, 0.0, 1.0),
        reliability=reliability,
    )


class _Fit:
    """State of the fit: posterior mean and covariance of (theta, a, b), and variances."""

    def __init__(
        self, observations: Sequence[ScoreObservation], items: int, together: bool
    ) -> None:
        self._items, self._together = items, together
        self._request = np.array([o.request for o in observations])
        self._item = np.array([o.item for o in observations])
        scores = np.array([o.score for o in observations])
        self.mean_score = float(scores.mean())
        self._y = scores - self.mean_score
        self._requests = int(self._request.max()) + 1
        spread = max(float(self._y.var()), _FLOOR)
        self._blocks = [slice(0, items)]
        self._variances = [spread]
        columns = [np.eye(items)[self._item]]
        if together:
            at = items + self._requests
            self._blocks += [slice(items, at), slice(at, at + 1), slice(at + 1, at + 3)]
            self._variances += [spread / 50, spread / 10, spread / 100]
            columns += [
                np.eye(self._requests)[self._request],
                _biases(np.array([o.place for o in observations])),
            ]
        self._design = np.hstack(columns)
        self._noise = spread / 4
        self._mean = np.zeros(self._design.shape[1])
        self._covariance: Floats = np.zeros((len(self._mean), len(self._mean)))

    @property
    def worth(self) -> Floats:
        return self._mean[: self._items]

    @property
    def reliability(self) -> float:
        return self._variances[0] / (self._variances[0] + self._noise)

    @property
    def errors(self) -> Floats:
        return centred_errors(self._covariance[: self._items, : self._items])

    def step(self) -> None:
        """Run one round: the posterior given the variances, then the variances given that."""
        prior = np.concatenate(
            [
                np.full(block.stop - block.start, 1 / variance)
                for block, variance in zip(self._blocks, self._variances, strict=True)
            ]
        )
        self._covariance = np.linalg.inv(
            self._design.T @ self._design / self._noise + np.diag(prior)
        )
        self._mean = self._covariance @ self._design.T @ self._y / self._noise
        doubt = np.diag(self._covariance)
        used = []
        for number, (block, variance) in enumerate(zip(self._blocks, self._variances, strict=True)):
            size = block.stop - block.start
            used.append(float(np.clip(size - doubt[block].sum() / variance, 1e-3, size)))
            squares = float((self._mean[block] ** 2).sum())
            self._variances[number] = max(squares / used[-1], _FLOOR)
        residual = self._y - self._design @ self._mean
        left = max(len(residual) - sum(used), _LEAST_FREEDOM)
        self._noise = max(float(residual @ residual) / left, _FLOOR)


def centred_errors(covariance: Floats) -> Floats:
    """Return standard errors ``[N]`` of each worth relative to the mean worth.

    The uncertainty of the mean itself does not affect the order, so it is left out.
    """
    centred = np.diag(covariance) - 2 * covariance.mean(axis=0) + covariance.mean()
    result: Floats = np.sqrt(np.maximum(centred, 0.0))
    return result


def tie(estimate: Estimate) -> Floats:
    """Return scores ``[N]`` in which indistinguishable trajectories have equal scores.

    From the best score down, all items whose interval overlaps the leader's interval form a tie and
    get their mean. Each is compared with the leader and not with its neighbour, because overlapping
    neighbours could otherwise chain the whole group into one tie.
    """
    order = np.argsort(-estimate.scores, kind="stable")
    tied = estimate.scores.copy()
    while len(order):
        together = estimate.high[order] >= estimate.low[order[0]]
        together[0] = True
        count = len(order) if together.all() else int(np.argmin(together))
        tied[order[:count]] = tied[order[:count]].mean()
        order = order[count:]
    return tied


def unstable(estimate: Estimate) -> list[int]:
    """Return the items whose interval overlaps a neighbour's in the order, best first."""
    order = [int(item) for item in np.argsort(-estimate.scores, kind="stable")]
    overlapping = [estimate.high[lower] >= estimate.low[upper] for upper, lower in pairwise(order)]
    above, below = [False, *overlapping], [*overlapping, False]
    return [item for item, a, b in zip(order, above, below, strict=True) if a or b]


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
    """``worth`` ``[N]``, advantage of being ``first``, and their covariance ``[N + 1, N + 1]``."""

    worth: Floats
    first: float
    covariance: Floats
    dispersion: float


def fit_preferences(wins: Sequence[Win], items: int) -> Estimate:
    """Return scores: the probability of being preferred to a random other trajectory.

    The probability leaves out the advantage of being shown first.
    """
    fit = _fit_preferences(wins, items)
    errors = centred_errors(fit.covariance[:items, :items]) * np.sqrt(fit.dispersion)
    return Estimate(
        scores=_against_others(fit.worth, fit.worth),
        low=_against_others(fit.worth - Z * errors, fit.worth),
        high=_against_others(fit.worth + Z * errors, fit.worth),
        reliability=max(0.0, 1 - min(1.0, fit.dispersion)),
    )


def information(wins: Sequence[Win], items: int) -> Floats:
    """Return the information ``[N, N]`` of comparing i with j, i shown first (D-optimal design).

    It is the variance of the answer times the variance of its log odds. An answer that is certain
    beforehand has no information, whether the trajectories or the position make it certain.
    """
    fit = _fit_preferences(wins, items)
    own = fit.covariance[:items, :items]
    pair = np.diag(own)[:, None] + np.diag(own)[None, :] - 2 * own
    side = fit.covariance[:items, items]
    odds = fit.covariance[items, items] + pair + 2 * (side[:, None] - side[None, :])
    chance = _sigmoid(fit.worth[:, None] - fit.worth[None, :] + fit.first)
    result: Floats = chance * (1 - chance) * odds
    return result


def _fit_preferences(wins: Sequence[Win], items: int) -> _Preferences:
    design, outcome = _design(wins, items)
    theta, variance = np.zeros(items + 1), 1.0
    for _ in range(_ROUNDS):
        prior = np.append(np.full(items, 1 / variance), 1 / _FIRST_VARIANCE)
        chance = _sigmoid(design @ theta)
        weight = chance * (1 - chance)
        precision = (design * weight[:, None]).T @ design + np.diag(prior)
        covariance = np.asarray(np.linalg.inv(precision), dtype=np.float64)
        step = covariance @ (design.T @ (outcome - chance) - prior * theta)
        theta = theta + np.clip(step, -2.0, 2.0)
        squares = theta[:items] ** 2 + np.diag(covariance)[:items]
        variance = float(np.clip(squares.mean(), *_VARIANCES))
    chance = _sigmoid(design @ theta)
    return _Preferences(
        worth=theta[:items],
        first=float(theta[items]),
        covariance=covariance,
        dispersion=_dispersion(design, outcome, chance, covariance),
    )


def _design(wins: Sequence[Win], items: int) -> tuple[Floats, Floats]:
    """Return one row for each comparison: +1 for the item shown first, -1 for the other."""
    design, outcome = np.zeros((len(wins), items + 1)), np.zeros(len(wins))
    for row, (winner, loser, winner_first) in enumerate(wins):
        first, second = (winner, loser) if winner_first else (loser, winner)
        design[row, first], design[row, second], design[row, items] = 1.0, -1.0, 1.0
        outcome[row] = float(winner_first)
    return design, outcome


def _dispersion(design: Floats, outcome: Floats, chance: Floats, covariance: Floats) -> float:
    """Return Pearson's statistic over the remaining degrees of freedom, clipped to [1e-4, 1]."""
    weight = np.maximum(chance * (1 - chance), 1e-9)
    used = float(np.einsum("ij,jk,ik,i->", design, covariance, design, weight))
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
