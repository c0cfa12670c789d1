"""The decision of a review, and its reason.

The checks have an order: first harm, then the validity of the comparison, then the evidence. At the
experiment's horizon the champion stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from babylon.core.settings import ExperimentSettings
from babylon.evaluation.experiment.review_records import (
    Comparison,
    Decision,
    Guardrail,
    SampleRatio,
)
from babylon.evaluation.experiment.shared_luck import FEWEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The figures that decide; ``hours`` since the experiment began."""

    pnl: Comparison | None
    ratios: Sequence[SampleRatio]
    guardrails: Sequence[Guardrail]
    hours: float


def decide(evidence: Evidence, settings: ExperimentSettings) -> tuple[Decision, str]:
    """Return the decision and its reason."""
    if broken := [guard for guard in evidence.guardrails if guard.state == "broken"]:
        return "rollback", f"guardrail broken: {'; '.join(map(told, broken))}"
    if missing := _missing(evidence, settings):
        return _undecided(evidence, settings, missing)
    assert evidence.pnl is not None  # nothing is missing
    pnl = f"P&L {evidence.pnl} $ a play"
    if evidence.pnl.high < -settings.tolerated_loss_usd:
        return "rollback", f"{pnl}: worse than the champion"
    if not evidence.pnl.low > 0:
        return _undecided(evidence, settings, f"{pnl}: not yet clear")
    if doubtful := [guard for guard in evidence.guardrails if guard.state == "doubtful"]:
        return _undecided(evidence, settings, f"{pnl}, but {'; '.join(map(told, doubtful))}")
    if evidence.hours < settings.min_hours:
        return "insufficient", (
            f"{pnl}, but only {evidence.hours:.1f} h old: AB_MIN_HOURS={settings.min_hours:g}"
        )
    return "promote", f"{pnl}: better than the champion"


def told(guard: Guardrail) -> str:
    """Return a measured guardrail as text."""
    interval = f"{guard.change:.3g} [{guard.low:.3g}, {guard.high:.3g}]"
    return f"{guard.name} {interval}, bound {guard.bound:g}"


def _missing(evidence: Evidence, settings: ExperimentSettings) -> str:
    """Return the reason why the P&L cannot decide yet, or an empty string."""
    for ratio in evidence.ratios:
        if ratio.broken:
            return (
                f"sample ratio broken: {ratio.challenger} challengers of"
                f" {ratio.champion + ratio.challenger} agents, {ratio.expected:.1f} expected"
                f" (p = {ratio.p_value:.2g}): the arms are not assigned at random; find the cause"
                " before promoting anything"
            )
    if evidence.pnl is None:
        return f"too little finished play: it takes two agents in each arm and {FEWEST} equal hours"
    agents = evidence.ratios[-1].champion + evidence.ratios[-1].challenger
    if agents < settings.min_agents:
        return f"{agents} agents with finished play: AB_MIN_AGENTS={settings.min_agents}"
    return ""


def _undecided(evidence: Evidence, settings: ExperimentSettings, why: str) -> tuple[Decision, str]:
    if evidence.hours >= settings.max_hours:
        return "keep", f"undecided after AB_MAX_HOURS={settings.max_hours:g}: {why}"
    return "insufficient", why
