"""The table ``model_performance``: one row per window, policy and kind of measurement.

``play`` is the mean over the window's trajectories that the policy played, in USD. ``validation``
is the window's gate: one row for the policy trained from the window and one for the champion, means
over the gate's scenarios in simulator dollars.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any, Literal, TypedDict

from babylon.core.home import Home
from babylon.core.trajectories import Trajectory, iter_trajectories
from babylon.core.types import Scored
from babylon.dataset.model_card import base_name
from babylon.dataset.trajectories import Selection
from babylon.store import Store
from babylon.store.policies import Policy, policies_about
from babylon.store.routes import champions_of


class Measurement(TypedDict, total=False):
    """A policy's figures in a window, without the columns about the policy itself."""

    policy_version: int | None
    measured: Literal["play", "validation"]
    trajectories: int
    scenarios: int
    pnl_usd: float | None
    win_rate: float | None
    malformed: float | None
    promoted: bool | None
    reason: str | None


async def performance_rows(
    store: Store, home: Home, scored: Scored, selection: Selection
) -> list[dict[str, Any]]:
    """Return the window's measurements, by kind and policy."""
    window_id = scored.claim.window_id
    rows = await asyncio.to_thread(_played, home, scored, selection)
    trained = (await policies_about(store, window_id)).values()
    verdicts = [policy.verdict or {} for policy in trained]
    played = [verdict["route_version"] for verdict in verdicts if verdict.get("scenarios")]
    routes = await champions_of(store, played)
    for policy in trained:
        rows += _validated(policy, routes)
    rows.sort(key=lambda row: (row["measured"], row["policy_version"] or -1))
    versions = {v for row in rows if (v := row["policy_version"]) is not None}
    policies = await policies_about(store, window_id, versions)
    return [_row(row, policies, window_id) for row in rows]


def _played(home: Home, scored: Scored, selection: Selection) -> list[Measurement]:
    taken = (
        one
        for one in iter_trajectories(home, scored.artifact)
        if selection.takes(one.agent_id, one.trajectory_id)
    )
    return list(played_rows(taken))


def played_rows(trajectories: Iterable[Trajectory]) -> Iterator[Measurement]:
    """Yield each policy's ``play`` row.

    A trajectory counts for a policy if all its calls with a known version are that policy's.
    """
    # Only figures are kept: the tokens of a window would fill the memory.
    groups: defaultdict[int, list[tuple[str, float, float]]] = defaultdict(list)
    for trajectory in trajectories:
        known = {call.policy_version for call in trajectory.calls}
        versions = [version for version in known if version is not None]
        if len(versions) == 1:
            figures = (trajectory.scenario_id, trajectory.pnl_usd, trajectory.win_rate)
            groups[versions[0]].append(figures)
    for version, played in groups.items():
        scenarios, pnl, win_rates = zip(*played, strict=True)
        yield {
            "policy_version": version,
            "measured": "play",
            "trajectories": len(played),
            "scenarios": len(set(scenarios)),
            "pnl_usd": fmean(pnl),
            "win_rate": fmean(win_rates),
        }


def _validated(policy: Policy, routes: dict[int, int]) -> Iterator[Measurement]:
    """Yield the challenger's and the champion's ``validation`` row if the gate was played."""
    verdict = policy.verdict
    if not verdict or not verdict.get("scenarios"):
        return
    champion = routes.get(verdict["route_version"], policy.parent_version)
    if champion == policy.policy_version:
        # The policy already served when its verdict was recorded: the gate compared its parent.
        champion = policy.parent_version
    for version, which in ((policy.policy_version, "after"), (champion, "before")):
        yield {
            "policy_version": version,
            "measured": "validation",
            "scenarios": verdict["scenarios"],
            "pnl_usd": verdict.get(f"pnl_{which}"),
            "win_rate": verdict.get(f"win_rate_{which}"),
            "malformed": verdict.get(f"malformed_{which}"),
            "promoted": verdict["promote"] if which == "after" else None,
            "reason": verdict["reason"] if which == "after" else None,
        }


def _row(row: Measurement, policies: dict[int, Policy], window_id: str) -> dict[str, Any]:
    version = row["policy_version"]
    policy = None if version is None else policies.get(version)
    return {
        "parent_version": policy and policy.parent_version,
        "kind": policy and policy.kind,
        "base_model": policy and base_name(policy.base_model),
        **row,
        "window_id": window_id,
    }
