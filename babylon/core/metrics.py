"""A window's metrics: one flat record of numbers and texts.

The command line, Prefect, W&B and the column ``metrics`` of ``babylon.windows`` share these names.
A later run resumes from the stage's manifest (``WindowRow.scored``), never from metrics.
"""

from babylon.core.types import Deployed, Metrics, Scored, Trained, Verdict


def scored_metrics(scored: Scored) -> Metrics:
    """The scorer's own metrics get the prefix ``judge_``."""
    held_out = scored.held_out
    return {
        "window_id": scored.claim.window_id,
        "eligible": scored.eligible,
        "agents": scored.agents,
        "trajectories": scored.artifact.rows,
        "held_out": held_out.rows if held_out else 0,
        "market_outcomes": scored.outcomes,
        "avg_reward": scored.avg_reward,
        "scorer": scored.scorer,
        **{f"judge_{name}": value for name, value in scored.metrics.items()},
    }


def window_metrics(
    scored: Scored, trained: Trained, verdict: Verdict, deployed: Deployed
) -> Metrics:
    """The metrics of play, scoring, update, validation and deployment."""
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
    }
