"""The views ``policy_fates`` and ``learning``: the fate of each policy and of its trajectories.

A fate is one of: ``in the champion's line``; ``in a challenger`` of the running experiment; ``in a
candidate``, committed and neither judged nor deployed; ``in a rejected candidate``; ``in a policy
rolled back``; ``released for training again``; and for a trajectory also ``free``.
"""

from dataclasses import dataclass

from babylon.store.connection import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePolicy:
    """A policy in the tree. ``trajectories`` trained it, those that it released included."""

    policy_version: int
    parent_version: int | None
    window_id: str | None
    fate: str
    trajectories: int
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """The fate of one trajectory; ``policy_version`` was trained on it last."""

    trajectory_id: str
    policy_version: int | None
    fate: str


async def policy_line(store: Store) -> list[LinePolicy]:
    """Return every policy with its fate, oldest first; ``reason`` is the verdict's or release's."""
    rows = await store.pool.fetch(_POLICIES)
    return [LinePolicy(**row) for row in rows]


async def count_fates(store: Store) -> dict[str, int]:
    """Return fate → number of trajectories."""
    rows = await store.pool.fetch(
        "SELECT fate, count(*) FROM babylon.learning GROUP BY 1 ORDER BY 2 DESC, 1"
    )
    return {row["fate"]: row["count"] for row in rows}


async def window_learning(store: Store, window_id: str) -> list[Learning]:
    """Return the fates of a window's trajectories, in the order of their ids.

    A free one is among those of every window that collected it.
    """
    rows = await store.pool.fetch(_OF_WINDOW, window_id)
    return [Learning(**row) for row in rows]


# The view finds the free ones of a window by sorting those of all windows.
_OF_WINDOW = """
SELECT trajectory_id, policy_version, fate FROM babylon.learning
WHERE window_id = $1 AND fate <> 'free'
UNION ALL
SELECT trajectory_id, NULL, 'free' FROM babylon.collected c WHERE window_id = $1
AND NOT EXISTS (SELECT FROM babylon.trained t WHERE t.trajectory_id = c.trajectory_id)
AND NOT EXISTS (SELECT FROM babylon.released r WHERE r.trajectory_id = c.trajectory_id)
ORDER BY 1
"""
_POLICIES = """
SELECT p.policy_version, p.parent_version, p.window_id, f.fate,
       (coalesce(t.n, 0) + coalesce(r.n, 0))::int AS trajectories,
       coalesce(released.reason, p.verdict->>'reason') AS reason
FROM babylon.policies p
JOIN babylon.policy_fates f USING (policy_version)
LEFT JOIN babylon.releases released USING (policy_version)
LEFT JOIN (SELECT batch_id, count(*) AS n FROM babylon.trained GROUP BY 1) t
    ON t.batch_id = p.batch_id
LEFT JOIN (SELECT policy_version, count(*) AS n FROM babylon.released GROUP BY 1) r
    USING (policy_version)
ORDER BY p.policy_version
"""
