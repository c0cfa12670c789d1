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
