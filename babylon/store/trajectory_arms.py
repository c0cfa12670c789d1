"""The arm that a trajectory began with: the first gateway that is asked decides for all."""

from collections.abc import Mapping

from babylon.core.types import Arm
from babylon.store.connection import Store


async def pin_arm(store: Store, salt: str, trajectory_id: str, arm: Arm) -> Arm:
    """The trajectory's arm in the experiment ``salt``: ``arm``, unless it has one already."""
    pinned: Arm = await store.pool.fetchval(  # the update changes nothing, but returns the row
        "INSERT INTO babylon.trajectory_arms AS pinned (salt, trajectory_id, arm)"
        " VALUES ($1, $2, $3) ON CONFLICT (salt, trajectory_id) DO UPDATE SET arm = pinned.arm"
        " RETURNING arm",
        salt,
        trajectory_id,
        arm,
    )
    return pinned


async def pin_arms(store: Store, arms: Mapping[tuple[str, str], Arm]) -> None:
    """(salt, trajectory id) → arm, of those that have none yet."""
    await store.pool.executemany(
        "INSERT INTO babylon.trajectory_arms (salt, trajectory_id, arm) VALUES ($1, $2, $3)"
        " ON CONFLICT DO NOTHING",
        [(*trajectory, arm) for trajectory, arm in arms.items()],
    )
