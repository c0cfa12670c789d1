"""Challenger minus champion, with a confidence sequence that holds at all looks together.

Within a stage (a period of constant share) the difference of the arms' means over agents is
unbiased. The stages' differences are averaged with weights ``N1 N0 / (N1 + N0)`` of their plays, so
that changes over time cancel. A single stage gives the textbook difference of two means.

CUPED (Deng, Xu, Kohavi, Walker 2013, "Improving the sensitivity of online controlled experiments by
utilizing pre-experiment data"): each agent's mean before the experiment, times a pooled theta, is
subtracted. Agents without history get the mean of the others, which leaves them unadjusted. An
agent's history is fixed before its arm is drawn, so neither choice biases the difference.

Variance: it is computed from each agent's influence on the difference, with all plays of an agent
as one cluster and both arms together (Waudby-Smith et al., arXiv 2103.06476, section 3.1,
randomised experiments). One sequence of the difference is tighter than two of the arms. Luck that
the agents of an arm share in an hour is added (``babylon.evaluation.experiment.shared_luck``).

Time: agents arrive and continue to play, so the sequence's clock is not the number of agents but
the information 1 / variance, in which such differences have independent increments (Scharfstein,
Tsiatis, Robins 1997). It is expressed in plays.

Few agents: the normal factor is replaced by Student's through the inverse of Wallace's
approximation (1959), with Satterthwaite's degrees of freedom. Each arm's variance is at least the
pooled variance, because a small arm may not have seen the rare large win yet.

Rare losses: live P&L has no bounds, so a loss that nobody has seen is outside of every sequence of
means and variances. The low end is therefore lower by what such a loss may cost
(``babylon.evaluation.arena.confidence.unseen_share``).
"""

import math

import numpy as np

from babylon.evaluation.arena.confidence import standard_errors, unseen_share
from babylon.evaluation.experiment.agent_outcomes import AgentOutcomes, Floats, Ints
from babylon.evaluation.experiment.review_records import Comparison
from babylon.evaluation.experiment.shared_luck import shared_luck

TIGHTEST = 500  # plays of independent agents in an even split at which the sequence is tightest
_ROUNDING = 1e-9
_LARGEST = 700.0  # exp of larger numbers overflows


def difference(
    outcomes: AgentOutcomes, *, shares: bool = False, at_stake: float = 0.0
) -> Comparison | None:
    """Compare the arms; None without a stage of two agents in each arm, or with too few hours.

    Args:
        shares: The outcomes are shares of a rare event. A few agents may all be at 0 by chance, so
            each arm's variance is computed with two more agents, one at 0 and one at 1 (Agresti,
            Caffo 2000).
        at_stake: What a play loses at most. So much may a play of the challenger lose, or one of
            the champion win, more often than was seen.
    """
    weights = _stage_weights(outcomes)
    if not weights.any():
        return None
    outcomes = outcomes.only(weights[outcomes.stage] > 0)
    groups, size = outcomes.groups, np.bincount(outcomes.groups)
    sign = np.where(outcomes.challenger, 1.0, -1.0)
    influence = sign * weights[outcomes.stage] / size[groups]
    before = _history(outcomes)
    theta = _theta(outcomes, before, weights)
    adjusted = outcomes.mean - theta * before
    luck = shared_luck(outcomes, _within(adjusted, groups), influence)
    if luck is None:
        return None
    by_agent, freedom = _variance(outcomes, adjusted, influence, shares)
    plain = _variance(outcomes, outcomes.mean, influence, shares)[0] + luck.excess
    variance, freedom = luck.added_to(by_agent, freedom)
    middle = float(influence @ adjusted)
    rounding = _ROUNDING * float(np.abs(adjusted).max())
    # If all agents of an arm have the same outcome, the variance is only rounding error.
    if variance <= rounding**2:
        middle = middle if abs(middle) > rounding else 0.0
        variance = plain = by_agent = middle**2 * _alike_by_chance(influence, groups)
        freedom = math.inf
    information = _information(outcomes, influence, variance, by_agent)
    half = 0.0
    if variance:
        half = math.sqrt(variance) * student(standard_errors(information / TIGHTEST), freedom)
    limit = 1.0 if shares else math.inf
    unseen = at_stake * unseen_share(luck.independent(_fewer_plays(outcomes)))
    return Comparison(
        champion=0.0 - float(influence @ np.where(outcomes.challenger, 0, adjusted)),
        challenger=float(influence @ np.where(outcomes.challenger, adjusted, 0)),
        champion_agents=_count(outcomes, False),
        challenger_agents=_count(outcomes, True),
        difference=middle,
        low=max(middle - half - unseen, -limit),
        high=min(middle + half, limit),
        explained=1 - variance / plain if plain else 0.0,
        information=information,
        unseen=unseen,
        shared=luck.excess / variance if variance else 0.0,
    )


def _alike_by_chance(influence: Floats, groups: Ints) -> float:
    """Return the variance of a difference of 1 between arms without any variance.

    A few agents may have the same outcome by chance. As for shares, each arm is given two more
    agents, one with the outcome of each arm.
    """
    size = np.bincount(groups)
    weight = np.bincount(groups, np.abs(influence)) ** 2
    return float((weight / ((size + 1) * (size + 2))).sum())


def student(normal: float, freedom: float) -> float:
    """Return Student's quantile with the probability of the normal quantile ``normal``."""
    if math.isinf(freedom):
        return normal
    wallace = normal * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(min(wallace**2 / freedom, _LARGEST)))


def _stage_weights(outcomes: AgentOutcomes) -> Floats:
    """``[stages]`` with sum 1; 0 for a stage with fewer than two agents in an arm."""
    stages = int(outcomes.stage.max(initial=-1)) + 1
    plays = np.bincount(outcomes.groups, outcomes.plays, 2 * stages).reshape(stages, 2)
    agents = np.bincount(outcomes.groups, minlength=2 * stages).reshape(stages, 2)
    total = plays.sum(axis=1)
    weights = np.zeros(stages)
    np.divide(plays.prod(axis=1), total, out=weights, where=total > 0)
    weights[(agents < 2).any(axis=1)] = 0.0
    return weights / weights.sum() if weights.any() else weights


def _history(outcomes: AgentOutcomes) -> Floats:
    """``[c]`` the covariate minus its mean; 0 for an agent without history."""
    known = ~np.isnan(outcomes.before)
    if not known.any():
        return np.zeros(len(outcomes.before))
    history: Floats = np.where(known, outcomes.before - outcomes.before[known].mean(), 0.0)
    return history


def _theta(outcomes: AgentOutcomes, before: Floats, weights: Floats) -> float:
    """Pooled regression slope, within arms and stages so that the effect itself is excluded."""
    deviation = _within(before, outcomes.groups)
    weight = weights[outcomes.stage]
    squares = float(weight @ deviation**2)
    return float(weight @ (deviation * outcomes.mean)) / squares if squares else 0.0


def _within(values: Floats, groups: Ints) -> Floats:
    size = np.maximum(np.bincount(groups), 1)
    deviations: Floats = values - (np.bincount(groups, values) / size)[groups]
    return deviations


def _variance(
    outcomes: AgentOutcomes, outcome: Floats, influence: Floats, shares: bool
) -> tuple[float, float]:
    """Return the difference's variance, clustered by agent, and its degrees of freedom."""
    groups, size = outcomes.groups, np.bincount(outcomes.groups)
    weight = np.bincount(groups, np.abs(influence)) ** 2
    degrees = np.maximum(size - 1.0, 1.0)
    within = _within(outcome, groups)
    inner = influence * within * np.sqrt(size / degrees)[groups]
    parts = np.bincount(groups, inner**2)  # each arm and stage by itself, without clustering
    pooled = np.bincount(outcomes.stage, within**2) / np.maximum(
        np.bincount(outcomes.stage) - 2.0, 1.0
    )
    floor = weight * pooled[np.arange(len(size)) // 2] / np.maximum(size, 1)
    squares = float((np.maximum(parts, floor) ** 2 / degrees).sum())
    more = np.maximum(floor - parts, 0.0)
    if shares:
        mean = np.bincount(groups, outcome) / np.maximum(size, 1)
        more += weight * (mean**2 + (1 - mean) ** 2) / ((size + 1) * (size + 2))
    freedom = float((parts + more).sum()) ** 2 / squares if squares else math.inf
    return float((np.bincount(outcomes.unit, inner) ** 2).sum() + more.sum()), freedom


def _information(
    outcomes: AgentOutcomes, influence: Floats, variance: float, by_agent: float
) -> float:
    """Number of plays of independent agents, half in each arm, that would give this variance.

    Without shared luck it is at least the number of agents: their outcomes may be alike by chance.
    """
    agents = 4 / float((np.bincount(outcomes.unit, np.abs(influence)) ** 2).sum())
    agents *= by_agent / variance if by_agent else 1.0
    between = float(outcomes.plays @ _within(outcomes.mean, outcomes.groups) ** 2)
    of_one = (float(outcomes.spread.sum()) + between) / float(outcomes.plays.sum())
    return max(agents, 4 * of_one / variance) if variance else agents


def _fewer_plays(outcomes: AgentOutcomes) -> float:
    return float(np.bincount(outcomes.challenger, outcomes.plays).min())


def _count(outcomes: AgentOutcomes, challenger: bool) -> int:
    return len(np.unique(outcomes.unit[outcomes.challenger == challenger]))
