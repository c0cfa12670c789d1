"""The table ``trajectory_arms``: the arm in which each trajectory of an experiment began.

A trajectory ends in the arm in which it began, although the challenger's share may change
meanwhile. The first gateway that answers the trajectory chooses the arm for all gateways.
"""

from collections.abc import Mapping
from datetime import timedelta

from babylon.core.types import Arm
from babylon.store.connection import Store


async def pin_arm(store: Store, salt: str, trajectory_id: str, arm: Arm) -> Arm:
    """Store ``arm`` unless the trajectory has an arm already; return the arm it has."""
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
    """Store (salt, trajectory id) → arm for the trajectories that have no arm yet."""
    await store.pool.executemany(
        "INSERT INTO babylon.trajectory_arms (salt, trajectory_id, arm) VALUES ($1, $2, $3)"
        " ON CONFLICT DO NOTHING",
        [(*trajectory, arm) for trajectory, arm in arms.items()],
    )


async def forget_arms(store: Store, after: timedelta) -> None:
    """Delete the arms of experiments that ended longer ago than ``after``."""
    await store.pool.execute(_FORGET, after)


_FORGET = """
DELETE FROM babylon.trajectory_arms WHERE salt IN (
    SELECT salt
    FROM (SELECT salt, lead(created_at) OVER (ORDER BY route_version) AS until
          FROM babylon.routes) AS reign
    WHERE salt IS NOT NULL GROUP BY salt
    HAVING bool_and(until IS NOT NULL) AND max(until) < now() - $1::interval
)
"""
