"""The lines of a stage's result in the log of its run: plain sentences with the figures.

They carry no prompt, no answer, no judge's reason and no ground truth, because logs travel further
than pages do.
"""

from collections.abc import Callable, Iterable
from typing import Any

from babylon.core.types import (
    Collected,
    Deployed,
    Published,
    Scored,
    Thinned,
    Trained,
    Validated,
    Verdict,
    WindowResult,
)
from babylon.training.update_health import figure, warnings

_UPDATE = ("training_loss", "kl_divergence", "ess", "entropy", "grad_norm")


def stage_lines(result: object) -> Iterable[str]:
    """Return the lines of a stage's manifest; none of a result that is not a manifest."""
    told = _LINES.get(type(result))
    return told(result) if told else ()


def _collected(found: Collected) -> Iterable[str]:
    truth = f", {found.outcomes} market outcomes" if found.outcomes else ", no market outcomes yet"
    if found.outcomes is None:
        truth = ""
    yield f"{found.artifact.rows} trajectories of window {found.claim.window_id} read{truth}"


def _validated(found: Validated) -> Iterable[str]:
    refused = sum(found.rejected.values())
    yield f"{found.artifact.rows} accepted, of {found.agents} agents; {refused} rejected"
    for reason, count in found.rejected.items():
        yield f"{count} rejected as {reason}"


def _thinned(found: Thinned) -> Iterable[str]:
    if not found.dropped:
        yield f"all {found.artifact.rows} are judged"
        return
    held_out = found.held_out.rows if found.held_out else 0
    yield f"{found.artifact.rows} are judged, {found.dropped} left out, {held_out} of them held out"
    yield f"this saves the judge about {found.saved_judge_tokens} tokens"


def _scored(found: Scored) -> Iterable[str]:
    yield (
        f"{found.artifact.rows} trajectories of {found.agents} agents scored by {found.scorer},"
        f" mean score {found.avg_reward:.3f}"
    )
    if found.metrics:
        yield ", ".join(f"{name} {figure(value)}" for name, value in found.metrics.items())


def _trained(found: Trained) -> Iterable[str]:
    yield (
        f"policy {found.parent_version} became policy {found.policy_version} in"
        f" {figure(found.metrics.get('train_steps'))} train steps on"
        f" {figure(found.metrics.get('trained_trajectories'))} trajectories"
    )
    known = [f"{n} {figure(found.metrics[n])}" for n in _UPDATE if n in found.metrics]
    if known:
        yield ", ".join(known)
    yield from warnings(found.metrics)


def _judged(found: Verdict) -> Iterable[str]:
    yield f"{found.ruling} policy {found.policy_version}: {found.reason}"
    if found.pnl_before is not None and found.pnl_after is not None:
        what, form = ("P&L", ".1f") if found.in_dollars else ("score", ".4g")
        yield (
            f"mean {what} of {found.scenarios} scenarios {found.pnl_before:{form}} before,"
            f" {found.pnl_after:{form}} after"
        )


def _deployed(found: Deployed) -> Iterable[str]:
    yield f"{found.arm or 'not deployed'}: {found.reason}"
    served = f", announced by {', '.join(found.acknowledged_by)}" if found.acknowledged_by else ""
    yield f"route {found.route_version} is in force with policy {found.policy_version}{served}"


def _published(found: Published) -> Iterable[str]:
    yield f"{found.rows} trajectories of window {found.window_id} are in the local dataset"


def _finished(found: WindowResult) -> Iterable[str]:
    took = found.metrics.get("duration_minutes")
    after = f" after {took:.1f} min" if isinstance(took, float) and found.changed else ""
    yield f"window {found.window_id} is {found.status}{after}: {found.reason or 'no reason given'}"


_LINES: dict[type, Callable[[Any], Iterable[str]]] = {
    Collected: _collected,
    Validated: _validated,
    Thinned: _thinned,
    Scored: _scored,
    Trained: _trained,
    Verdict: _judged,
    Deployed: _deployed,
    Published: _published,
    WindowResult: _finished,
}
