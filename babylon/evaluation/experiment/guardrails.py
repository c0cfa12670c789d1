"""Guardrails: measures that a challenger must not make notably worse, whatever it earns.

Each is compared like P&L, by agent, with its own confidence sequence. It is broken if the whole
interval lies beyond the bound. It is doubtful if only the centre does, which blocks a promotion.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from babylon.evaluation.experiment.agent_outcomes import AgentOutcomes
from babylon.evaluation.experiment.difference import difference
from babylon.evaluation.experiment.review_records import Guardrail, State

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
        outcomes = _logarithms(outcomes)
    found = difference(outcomes, shares=not measure.latency)
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


def _state(low: float, change: float, bound: float) -> State:
    return "broken" if low > bound else "doubtful" if change > bound else "passes"


def _logarithms(outcomes: AgentOutcomes) -> AgentOutcomes:
    return replace(outcomes, mean=np.log(np.maximum(outcomes.mean, 1.0)))
