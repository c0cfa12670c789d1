"""A window's metrics: one flat record, and enough to take up a window where a crash left it.

The command line, Prefect, W&B and the column ``metrics`` of ``babylon.windows`` share these names.
"""

from collections.abc import Mapping
from typing import Any

from babylon.core.types import Artifact, Claim, Deployed, Metrics, Scored, Trained, Verdict

SCORER_METRIC = "judge_"  # before the names of what a scorer tells of itself


def scored_metrics(scored: Scored) -> Metrics:
    return {
        "window_id": scored.claim.window_id,
        "eligible": scored.eligible,
        "agents": scored.agents,
        "trajectories": scored.artifact.rows,
        "avg_reward": scored.avg_reward,
        "scorer": scored.scorer,
        **{f"{SCORER_METRIC}{name}": value for name, value in scored.metrics.items()},
        "artifact_uri": scored.artifact.uri,
        "artifact_sha256": scored.artifact.sha256,
        **_held_out(scored.held_out),
    }


def _held_out(artifact: Artifact | None) -> Metrics:
    if artifact is None:
        return {}
    return {
        "held_out": artifact.rows,
        "held_out_uri": artifact.uri,
        "held_out_sha256": artifact.sha256,
    }


def held_out_from(window_id: str, metrics: Mapping[str, Any]) -> Artifact | None:
    """What dropout left out of a window, if anything."""
    if "held_out_uri" not in metrics:
        return None
    return Artifact(
        uri=metrics["held_out_uri"],
        sha256=metrics["held_out_sha256"],
        rows=metrics["held_out"],
        window_id=window_id,
    )


def scored_from(claim: Claim, metrics: Mapping[str, Any]) -> Scored:
    """The inverse of ``scored_metrics``: an earlier run's manifest, under the present claim."""
    return Scored(
        claim=claim,
        artifact=Artifact(
            uri=metrics["artifact_uri"],
            sha256=metrics["artifact_sha256"],
            rows=metrics["trajectories"],
            window_id=claim.window_id,
        ),
        eligible=metrics["eligible"],
        agents=metrics["agents"],
        scorer=metrics["scorer"],
        avg_reward=metrics["avg_reward"],
        metrics={
            name.removeprefix(SCORER_METRIC): value
            for name, value in metrics.items()
            if name.startswith(SCORER_METRIC)
        },
        held_out=held_out_from(claim.window_id, metrics),
    )


def window_metrics(
    scored: Scored, trained: Trained, verdict: Verdict, deployed: Deployed, minutes: float
) -> Metrics:
    """What DESIGN.md asks of a window: play, update, and P&L before and after."""
    return {
        **scored_metrics(scored),
        **trained.metrics,
        "policy_version": trained.policy_version,
        "parent_version": trained.parent_version,
        "pnl_before": verdict.pnl_before,
        "pnl_after": verdict.pnl_after,
        "win_rate_before": verdict.win_rate_before,
        "win_rate_after": verdict.win_rate_after,
        "drawdown_before": verdict.drawdown_before,
        "drawdown_after": verdict.drawdown_after,
        "malformed_before": verdict.malformed_before,
        "malformed_after": verdict.malformed_after,
        "arena_scenarios": verdict.scenarios,
        "arena_suite": verdict.suite_digest,
        "promoted": verdict.promote,
        "ruling": verdict.ruling,
        "verdict": verdict.reason,
        "deployment_success": deployed.deployed,
        "deployment": deployed.reason,
        "arm": deployed.arm,
        "route_version": deployed.route_version,
        "duration_minutes": minutes,
    }
