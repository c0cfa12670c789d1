"""The deploy stage of a window, as a page."""

from collections.abc import Iterator
from typing import Any

from babylon.core.types import Change, Deployed, Verdict


def deployed_markdown(deployed: Deployed, verdict: Verdict) -> str:
    """Outcome, checks, the experiment's analysis, and the duration of each change of the route."""
    outcome = deployed.arm or "not deployed"
    # Who serves a route is known only of one that was waited for.
    changes, served = deployed.changes, ""
    followed = changes[-1].acknowledged_by if changes else deployed.acknowledged_by
    if changes or followed:
        served = f", served by {', '.join(followed) or 'no gateway'}"
    lines = [
        f"# Window {deployed.claim.window_id}, policy {verdict.policy_version}: {outcome}",
        "",
        deployed.reason,
        "",
        f"Route {deployed.route_version} is in force{served}.",
        "",
    ]
    if deployed.checks:
        lines += _checks(deployed.checks)
    if review := deployed.review:
        lines += [f"Experiment `{review['experiment']}`: {review['decision']}, {review['reason']}"]
    if deployed.changes:
        lines += _timings(deployed.changes)
    return "\n".join(lines)


def serving(change: Change) -> str:
    """The policies that serve after a change, in words."""
    if change.challenger_version is None or change.share is None:
        return f"policy {change.policy_version} for every agent"
    return (
        f"policy {change.policy_version}, and policy {change.challenger_version} for"
        f" {change.share:.0%} of the agents ({change.mode})"
    )


def _checks(checks: dict[str, Any]) -> Iterator[str]:
    yield from ("| check | | found |", "| --- | --- | --- |")
    for name, check in checks["checks"].items():
        passed = "passed" if check["passed"] else "**failed**"
        yield f"| {name} | {passed} | {check['reason'].replace('|', '¦')} |"
    yield ""


def _timings(changes: tuple[Change, ...]) -> Iterator[str]:
    yield from (
        "| route | serves | loading, s | checks, s | commit to acknowledgement, s | draining, s |",
        "| ---: | --- | ---: | ---: | ---: | ---: |",
    )
    for change in changes:
        seconds = (change.prepare_s, change.check_s, change.commit_s, change.drain_s)
        figures = " | ".join(f"{value:.2f}" for value in seconds)
        yield f"| {change.route_version} | {serving(change)} | {figures} |"
    yield ""
