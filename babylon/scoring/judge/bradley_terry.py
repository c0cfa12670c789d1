"""Bradley-Terry model: scores of trajectories from pairwise preferences (Bradley and Terry 1952).

P(i preferred to j, i shown first) = sigmoid(theta_i - theta_j + first)

The prior theta ~ N(0, v) acts as a ridge; EM estimates its variance v. ``first`` is the advantage
of the position shown first, and has a flat prior. Standard errors come from the quasi-likelihood
(McCullagh and Nelder 1989, ch. 9): the curvature times the dispersion of the residuals. A judge
that never contradicts itself leaves residuals near zero, so its intervals shrink to points. A judge
that guesses has dispersion one. The fit is our own, because choix has no term for the order shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from babylon.scoring.judge.calibrate import Estimate, Floats, Z, centred_errors

Win = tuple[int, int, bool]
"""Winner, loser, and whether the winner was shown first."""

_ROUNDS = 60
_FIRST_VARIANCE = 1000.0
_VARIANCES = (0.05, 1000.0)
_MIN_DISPERSION = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """``worth`` ``[N]``, advantage of being ``first``, and their covariance ``[N + 1, N + 1]``."""

    worth: Floats
    first: float
    covariance: Floats
    dispersion: float


def fit_preferences(wins: Sequence[Win], items: int) -> Estimate:
    """Return scores: the probability of being preferred to a random other trajectory.

    The probability leaves out the advantage of being shown first.
    """
    fit = _fit(wins, items)
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
    fit = _fit(wins, items)
    own = fit.covariance[:items, :items]
    pair = np.diag(own)[:, None] + np.diag(own)[None, :] - 2 * own
    side = fit.covariance[:items, items]
    odds = fit.covariance[items, items] + pair + 2 * (side[:, None] - side[None, :])
    chance = _sigmoid(fit.worth[:, None] - fit.worth[None, :] + fit.first)
    result: Floats = chance * (1 - chance) * odds
    return result


def _fit(wins: Sequence[Win], items: int) -> _Fit:
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
    return _Fit(
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
