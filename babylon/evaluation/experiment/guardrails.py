"""Guardrails: measures that a challenger must not make notably worse, whatever it earns.

Each is compared like P&L, by agent, with its own confidence sequence. It is broken if the whole
interval lies beyond the bound. It is doubtful if only the centre does, which blocks a promotion.
Heavy losses are luck of the market too, so they are compared by hour as well. With too
few hours their interval is -1 to 1: they may be doubtful, but not broken.

The sample ratio guards the comparison itself: the numbers of agents in the arms must match the
split. If they do not, the arms are not random (a policy drives agents away, or the split is
faulty), and no comparison is valid: Fabijan et al. (2019), "Diagnosing sample ratio mismatch in
online controlled experiments". Each agent's probability is the share at its first call, so the
number of challengers is Poisson-binomial. Its exact distribution is a convolution of one binomial
per share.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from babylon.evaluation.experiment.agent_outcomes import AgentOutcomes, Floats
from babylon.evaluation.experiment.difference import difference
from babylon.evaluation.experiment.review_records import Guardrail, SampleRatio, State

ALPHA = 0.001  # of the sample ratio
_LARGEST = 700.0  # exp of larger numbers overflows


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure with its ``bound`` on the difference of shares, or on the ratio of latencies."""

    name: str
    bound: float
    latency: bool = False


BROKEN_OFF = Measure("calls that broke off", 0.02)
CUT = Measure("replies cut at their length limit", 0.05)
FAILED = Measure("failed actions", 0.05)
LOSSES = Measure("plays that lost over a tenth of the balance", 0.05)
MEDIAN = Measure("latency, median", 1.5, latency=True)
P95 = Measure("latency, 95th percentile", 1.5, latency=True)


def guard(measure: Measure, outcomes: AgentOutcomes) -> Guardrail:
    """``outcomes``: shares, or milliseconds (above 0) of a latency."""
    if measure.latency:
        outcomes = replace(outcomes, mean=np.log(np.maximum(_unrounded(outcomes), 1.0)))
    found = difference(outcomes, shares=not measure.latency)
    if found is None and outcomes.cells is not None:
        found = difference(replace(outcomes, cells=None), shares=True)
        found = found and replace(found, low=-1.0, high=1.0)
    if found is None:
        return Guardrail(name=measure.name, state="unknown", bound=measure.bound)
    figures = [found.champion, found.challenger, found.difference, found.low, found.high]
    if measure.latency:  # exp of means of logarithms: geometric means and their ratio
        figures = [math.exp(min(value, _LARGEST)) for value in figures]
    champion, challenger, change, low, high = figures
    return Guardrail(
        name=measure.name,
        state=_state(low, change, measure.bound),
        bound=measure.bound,
        champion=champion,
        challenger=challenger,
        change=change,
        low=low,
        high=high,
    )


def _unrounded(outcomes: AgentOutcomes) -> Floats:
    """``[c]`` latencies, spread evenly over the millisecond to which they were rounded.

    Without this, two agents with the same latency would show that it never varies.
    """
    groups, size = outcomes.groups, np.bincount(outcomes.groups)
    order = np.lexsort((outcomes.mean, groups))
    rank = np.empty(len(order))  # in the own arm and stage
    rank[order] = np.arange(len(order)) - (np.cumsum(size) - size)[groups[order]]
    spread: Floats = outcomes.mean + (rank + 0.5) / size[groups] - 0.5
    return spread


def _state(low: float, change: float, bound: float) -> State:
    return "broken" if low > bound else "doubtful" if change > bound else "passes"


def sample_ratio(shares: Sequence[float], challengers: int) -> SampleRatio:
    """Test the number of challengers. ``shares``: each agent's probability of being one."""
    expected = math.fsum(shares)
    chances = np.ones(1)
    for share, agents in Counter(shares).items():
        chances = np.convolve(chances, _binomial(agents, share))
    observed = chances[challengers]
    p_value = min(float(chances[chances <= observed * (1 + 1e-9)].sum()), 1.0)
    return SampleRatio(
        champion=len(shares) - challengers,
        challenger=challengers,
        expected=expected,
        p_value=p_value,
        broken=p_value < ALPHA,
    )


def _binomial(n: int, p: float) -> Floats:
    """``[n + 1]`` the probability of each count."""
    k = np.arange(n + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    ways = log_factorial[n] - log_factorial - log_factorial[::-1]
    chances: Floats = np.exp(ways + k * math.log(p) + (n - k) * math.log1p(-p))
    return chances
