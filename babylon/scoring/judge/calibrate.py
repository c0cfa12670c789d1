"""Scores of many requests → one score a trajectory, each with an interval.

A judge that scores lists is noisy, favours places in the list, and has no fixed scale: the same
trajectory gets another number in other company. Score s of trajectory i at place p of request r:

    s = mean + theta_i + a_r + b(p) + noise,    noise ~ N(0, sigma2)

with theta_i ~ N(0, v_theta) the trajectory's worth, a_r ~ N(0, v_a) how generous the request was,
and b(p) the bias for a place: a slope along the list, and with a variance of their own the first
place and the last, or the ends against the middle would be as uncertain as first against last.
It is the ridge Plackett-Luce of scores rather than ranks: comparisons within requests, tied
together by what requests share. No ridge is chosen, because the variances follow from the data
(Henderson's mixed model equations, with MacKay's fixed point for the variances, Neural Computation
4, 1992). So the reliability of the judge, v_theta / (v_theta + sigma2) (arXiv 2601.21817 for judges
that compare pairs), decides how far scores shrink together and how wide intervals are; of a judge
that never contradicts itself sigma2 goes to its floor, and intervals close.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

Z = 0.674  # half width of an interval in standard errors: it holds the truth every other time
_ROUNDS = 60
_FLOOR = 1e-13  # of a variance: beyond what judges write and doubles hold
_LEAST_FREEDOM = 0.5  # degrees of freedom that the noise is taken to have at least


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreObservation:
    """One score: of ``item`` in ``request`` at ``place`` (0 first, 1 last; 0.5 alone)."""

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
    """Fit the model. ``together``: requests showed several trajectories; alone there is neither
    company nor place, and the model is a mean with noise.
    """
    fit = _Fit(observations, items, together)
    for _ in range(_ROUNDS):
        fit.step()
    return _within_unit(fit.mean_score + fit.worth, Z * fit.errors, fit.reliability)


def _within_unit(scores: Floats, half: Floats, reliability: float) -> Estimate:
    """Into [0, 1] without changing the order: squeezed where noise carried one beyond."""
    floor, top = min(0.0, float(scores.min())), max(1.0, float(scores.max()))
    scores, half = (scores - floor) / (top - floor), half / (top - floor)
    return Estimate(
        scores=scores,
        low=np.clip(scores - half, 0.0, 1.0),
        high=np.clip(scores + half, 0.0, 1.0),
        reliability=reliability,
    )


class _Fit:
    """Where the iteration is: posterior mean and covariance of (theta, a, b), and variances."""

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
        """One round: posterior given the variances, then the variances given it."""
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
    """Standard errors ``[N]`` of each worth against the mean worth: where all of them lie together
    is no uncertainty of their order."""
    centred = np.diag(covariance) - 2 * covariance.mean(axis=0) + covariance.mean()
    result: Floats = np.sqrt(np.maximum(centred, 0.0))
    return result


def tie(estimate: Estimate) -> Floats:
    """Scores ``[N]`` in which trajectories that the judge could not tell apart have the same.

    From the best down, all whose interval overlaps that of the best one left form a tie, and get
    its mean. Each is held against the leader, not merely against a neighbour, so chains do not
    grow.
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
    """Trajectories whose interval overlaps that of a neighbour in the order, best first."""
    order = [int(item) for item in np.argsort(-estimate.scores, kind="stable")]
    overlapping = [estimate.high[lower] >= estimate.low[upper] for upper, lower in pairwise(order)]
    above, below = [False, *overlapping], [*overlapping, False]
    return [item for item, a, b in zip(order, above, below, strict=True) if a or b]


def _biases(place: Floats) -> Floats:
    """Columns ``[observations, 3]``: along the list from first to last, first of it, last of it."""
    return np.stack([0.5 - place, place == 0.0, place == 1.0], axis=1).astype(float)
