"""The second check: recorded play that the challenger was not trained on.

Two sources, the newest windows first: what dropout left out of a window; and whole windows that
were trained into a policy from which the challenger does not descend, because its verdict was not
to promote. A recipe may train what dropout left out, and leave some of that out again: whatever
went into the challenger or a policy before it is no held-out play, and each trajectory counts once.
A home whose windows are small and all promoted has neither, and the verdict says so.
"""

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from babylon.core.errors import ArtifactError
from babylon.core.settings import Settings
from babylon.core.trajectories import Trajectory, read_trajectories
from babylon.core.types import Artifact, OffPolicy, Trained
from babylon.core.windows import WindowState
from babylon.evaluation.arena.off_policy import off_policy
from babylon.store.connection import Store
from babylon.store.policies import descends, policy_of_batch, trained_into
from babylon.store.windows import WindowRow, list_windows

MOST = 512  # trajectories: enough for a mean, minutes of a large model
log = logging.getLogger(__name__)


async def second_check(store: Store, settings: Settings, trained: Trained) -> OffPolicy:
    """Importance-weighted P&L of the held-out play, or why it says nothing."""
    found: dict[str, Trajectory] = {}
    problem = "no held-out play: all that was recorded was trained on"
    for row in reversed(await list_windows(store)):
        for artifact in await _held_out(store, row, trained):
            try:
                played = await asyncio.to_thread(read_trajectories, artifact)
            except ArtifactError as error:  # of one window: the others tell all the same
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
    return await asyncio.to_thread(_check, settings, trained, [*found.values()][:MOST])


async def _held_out(store: Store, row: WindowRow, trained: Trained) -> list[Artifact]:
    artifacts = []
    if row.scored is None:
        return artifacts
    if row.scored.held_out:
        artifacts.append(row.scored.held_out)
    if row.state == WindowState.REJECTED and row.batch_id is not None:
        policy = await policy_of_batch(store, row.batch_id)
        if policy and not await descends(store, trained.policy_version, policy.policy_version):
            artifacts.append(row.scored.artifact)
    return artifacts


def _check(settings: Settings, trained: Trained, played: Sequence[Trajectory]) -> OffPolicy:
    from babylon.training.likelihood import log_ratios  # torch takes seconds to import

    ratios = log_ratios(trained.checkpoint_uri, played, settings.training.max_tokens)
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
