"""Who is better of two, many times → one score a trajectory (Bradley and Terry 1952).

P(i preferred to j, i shown first) = sigmoid(theta_i - theta_j + first), with
theta ~ N(0, v): ridge, its strength v estimated by EM. ``first`` is what being shown first is
worth, and free. Standard errors are those of the quasi-likelihood (McCullagh and Nelder 1989,
ch. 9): the curvature times the dispersion that the residuals show. A judge that never contradicts
itself leaves residuals near zero, and intervals close; one that guesses has dispersion one.
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
_DISPERSION = 1e-4  # the least


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """``worth`` ``[N]``, what being ``first`` is worth, covariance ``[N + 1, N + 1]`` of both."""

    worth: Floats
    first: float
    covariance: Floats
    dispersion: float


def fit_preferences(wins: Sequence[Win], items: int) -> Estimate:
    """A score is the probability of being preferred to a random other trajectory, whichever is
    shown first."""
    fit = _fit(wins, items)
    errors = centred_errors(fit.covariance[:items, :items]) * np.sqrt(fit.dispersion)
    return Estimate(
        scores=_against_others(fit.worth, fit.worth),
        low=_against_others(fit.worth - Z * errors, fit.worth),
        high=_against_others(fit.worth + Z * errors, fit.worth),
        reliability=max(0.0, 1 - min(1.0, fit.dispersion)),
    )


def information(wins: Sequence[Win], items: int) -> Floats:
    """What asking about i and j, i shown first, would tell: ``[N, N]``.

    It is the variance of the answer times that of its log odds (D-optimal design): an answer known
    beforehand tells nothing, be it for the trajectories or for what being first is worth.
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
    """One row a comparison, +1 for the one shown first and -1 for the other."""
    design, outcome = np.zeros((len(wins), items + 1)), np.zeros(len(wins))
    for row, (winner, loser, winner_first) in enumerate(wins):
        first, second = (winner, loser) if winner_first else (loser, winner)
        design[row, first], design[row, second], design[row, items] = 1.0, -1.0, 1.0
        outcome[row] = float(winner_first)
    return design, outcome


def _dispersion(design: Floats, outcome: Floats, chance: Floats, covariance: Floats) -> float:
    """Pearson's statistic over the degrees of freedom that the fit leaves."""
    weight = np.maximum(chance * (1 - chance), 1e-9)
    used = float(np.einsum("ij,jk,ik,i->", design, covariance, design, weight))
    pearson = float(((outcome - chance) ** 2 / weight).sum())
    return min(1.0, max(pearson / max(len(outcome) - used, 1.0), _DISPERSION))


def _against_others(worth: Floats, field: Floats) -> Floats:
    """Mean probability ``[N]`` that each worth beats the field's others."""
    chances = _sigmoid(worth[:, None] - field[None, :])
    own = np.diag(chances)
    result: Floats = (chances.sum(axis=1) - own) / max(len(field) - 1, 1)
    return result


def _sigmoid(x: Floats) -> Floats:
    result: Floats = 0.5 * (1 + np.tanh(x / 2))
    return result
