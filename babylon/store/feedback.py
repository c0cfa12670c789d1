"""The table ``feedback``: rewards, metrics, labels and comments of trajectories, steps and calls.

A window's scorer reads the feedback that was given before the window was collected. Later feedback
is late like a late row: a recipe that takes the window up again reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from babylon.store.connection import Connection, Store
from babylon.store.plays import ROW_BYTES

REWARD = "reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """One piece of feedback. Without ``step`` and ``call_id`` it is about the whole trajectory."""

    trajectory_id: str
    name: str = REWARD
    step: int | None = None
    call_id: str | None = None
    value: float | None = None
    label: str | None = None
    comment: str | None = None


async def give_feedback(connection: Connection, given: Feedback) -> bool:
    """Store feedback, unless the newest of its name and target says the same.

    Returns:
        True if it is late: the trajectory's window was collected before.
    """
    late: bool = await connection.fetchval(
        _GIVE,
        given.trajectory_id,
        -1 if given.step is None else given.step,
        given.call_id or "",
        *(given.name, given.value, given.label, given.comment),
    )
    return late


async def feedback_bytes(connection: Connection, trajectory_id: str) -> int:
    """Return the size of a trajectory's feedback. Each piece counts ``ROW_BYTES`` more."""
    size: int = await connection.fetchval(_SIZE, trajectory_id, ROW_BYTES)
    return size


async def known_feedback(
    store: Store, window_key: str, trajectory_ids: Sequence[str]
) -> list[Feedback]:
    """Return the feedback that was given before the window was collected, by name and target."""
    rows = await store.pool.fetch(_KNOWN, window_key, list(trajectory_ids))
    return [Feedback(**row) for row in rows]


_GIVE = """
WITH newest AS (
    SELECT value, label, comment FROM babylon.feedback
    WHERE (trajectory_id, step, call_id, name) = ($1, $2::int, $3, $4)
    ORDER BY given_at DESC LIMIT 1
), given AS (
    INSERT INTO babylon.feedback (trajectory_id, step, call_id, name, value, label, comment)
    SELECT $1, $2::int, $3, $4, $5::float8, $6::text, $7::text
    WHERE NOT EXISTS (
        SELECT FROM newest WHERE (value, label, comment) IS NOT DISTINCT FROM ($5, $6, $7)
    )
)
SELECT EXISTS (
    SELECT FROM babylon.plays p JOIN babylon.windows w USING (window_id)
    WHERE p.trajectory_id = $1 AND w.collected_at IS NOT NULL
)
"""

_SIZE = """
SELECT coalesce(sum(coalesce(octet_length(comment), 0) + $2::integer), 0)::bigint
FROM babylon.feedback WHERE trajectory_id = $1
"""

_KNOWN = """
SELECT trajectory_id, name, nullif(step, -1) AS step, nullif(call_id, '') AS call_id,
       (array_agg(value ORDER BY given_at DESC) FILTER (WHERE value IS NOT NULL))[1] AS value,
       (array_agg(label ORDER BY given_at DESC) FILTER (WHERE label IS NOT NULL))[1] AS label,
       (array_agg(comment ORDER BY given_at DESC) FILTER (WHERE comment IS NOT NULL))[1] AS comment
FROM babylon.feedback
WHERE trajectory_id = ANY($2::text[])
  AND given_at <= (SELECT coalesce(collected_at, now()) FROM babylon.windows WHERE window_id = $1)
GROUP BY trajectory_id, feedback.step, feedback.call_id, name
ORDER BY trajectory_id, feedback.step, feedback.call_id, name
"""
