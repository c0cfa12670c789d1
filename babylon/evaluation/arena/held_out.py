"""The gate's second check: the challenger's P&L on recorded play that it was not trained on.

Held-out play has two sources, newest windows first: trajectories that dropout removed from a
window, and whole windows whose policy was not promoted, so that the challenger does not descend
from it. Trajectories that were trained into the challenger or its ancestors are excluded, and each
trajectory counts once. If all windows are small and promoted, there is no held-out play, and the
verdict says so.
"""

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from babylon.core.errors import ArtifactError
from babylon.core.trajectories import Trajectory, read_trajectories
from babylon.core.types import Artifact, OffPolicy, Trained
from babylon.core.windows import WindowState
from babylon.evaluation.arena.off_policy import off_policy
from babylon.store.connection import Store
from babylon.store.lineage import descends, trained_into
from babylon.store.policies import policy_of_batch
from babylon.store.windows import WindowRow, list_windows

MOST = 512  # trajectories: enough for a mean; a large model needs minutes for them
log = logging.getLogger(__name__)


async def held_out_check(store: Store, trained: Trained, max_tokens: int | None) -> OffPolicy:
    """Return the importance-weighted P&L of held-out play, or the reason why there is none.

    Args:
        max_tokens: Largest number of tokens computed at once; None: no limit.
    """
    found: dict[str, Trajectory] = {}
    problem = "no held-out play: all that was recorded was trained on"
    for row in reversed(await list_windows(store)):
        for artifact in await _held_out(store, row, trained):
            try:
                played = await asyncio.to_thread(read_trajectories, artifact)
            except ArtifactError as error:  # one unreadable window must not stop the check
                problem = f"held-out play cannot be read: {error}"
                log.warning("window %s: %s", row.window_id, problem)
                continue
            ids = [trajectory.trajectory_id for trajectory in played]
            seen = await trained_into(store, trained.policy_version, ids)
            found |= {name: t for name, t in zip(ids, played, strict=True) if name not in seen}
        if len(found) >= MOST:
            break
    if not found:
        return OffPolicy(problem=problem)
    return await asyncio.to_thread(_check, trained, [*found.values()][:MOST], max_tokens)


async def _held_out(store: Store, row: WindowRow, trained: Trained) -> list[Artifact]:
    artifacts: list[Artifact] = []
    if row.scored is None:
        return artifacts
    if row.scored.held_out:
        artifacts.append(row.scored.held_out)
    if row.state == WindowState.REJECTED and row.batch_id is not None:
        policy = await policy_of_batch(store, row.batch_id)
        if policy and not await descends(store, trained.policy_version, policy.policy_version):
            artifacts.append(row.scored.artifact)
    return artifacts


def _check(trained: Trained, played: Sequence[Trajectory], max_tokens: int | None) -> OffPolicy:
    from babylon.training.likelihood import log_ratios  # torch takes seconds to import

    ratios = log_ratios(trained.checkpoint_uri, played, max_tokens)
    exact = [trajectory for trajectory in played if trajectory.trajectory_id in ratios]
    if not exact:
        return OffPolicy(
            problem=f"none of {len(played)} held-out trajectories has its exact tokens and logprobs"
        )
    return off_policy(
        np.array([ratios[trajectory.trajectory_id] for trajectory in exact]),
        np.array([trajectory.pnl_usd for trajectory in exact]),
        [f"{trajectory.window_id}/{trajectory.scenario_id}" for trajectory in exact],
    )
