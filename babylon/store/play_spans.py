"""The table ``play_spans``: what agents' spans tell of trajectories that are not finished."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from babylon.store.connection import Connection, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSpan:
    """A span by its ids (hexadecimal). ``span`` is what it tells, as JSON.

    ``root``: the trajectory is one trace, and this span ended it.
    """

    trace_id: str
    span_id: str
    root: bool
    span: str


async def trajectories_of(store: Store, key_id: str, trace_ids: Collection[str]) -> dict[str, str]:
    """Return trace → trajectory, for the traces that spans of this key belong to."""
    rows = await store.pool.fetch(_TRAJECTORIES, list(trace_ids), key_id)
    return {row["trace_id"]: row["trajectory_id"] for row in rows}


async def add_spans(
    connection: Connection, trajectory_id: str, spans: Sequence[StoredSpan]
) -> None:
    """Store the spans of a locked trajectory that are new."""
    await connection.executemany(
        _ADD, [(one.trace_id, one.span_id, trajectory_id, one.root, one.span) for one in spans]
    )


async def known_spans(connection: Connection, spans: Iterable[StoredSpan]) -> int:
    """Return the number of spans that are stored already."""
    ids = [(one.trace_id, one.span_id) for one in spans]
    known: int = await connection.fetchval(_KNOWN, [t for t, _ in ids], [s for _, s in ids])
    return known


async def read_spans(connection: Connection, trajectory_id: str) -> list[str]:
    """Return the spans (JSON) of an unfinished trajectory."""
    rows = await connection.fetch(
        "SELECT span FROM babylon.play_spans WHERE trajectory_id = $1 AND span IS NOT NULL"
        " ORDER BY trace_id, span_id",
        trajectory_id,
    )
    return [row["span"] for row in rows]


async def close_spans(session: "Connection | Store", trajectory_id: str) -> None:
    """Forget what the spans of a trajectory told, but not their ids."""
    pool = session.pool if isinstance(session, Store) else session
    await pool.execute(
        "UPDATE babylon.play_spans SET span = NULL WHERE trajectory_id = $1 AND span IS NOT NULL",
        trajectory_id,
    )


async def ended_trajectories(store: Store, rest_s: float) -> list[tuple[str, str]]:
    """Return the trajectory id and the key id of each unfinished trajectory whose spans end.

    Its root has arrived, or no span came for ``rest_s`` seconds. A trajectory with steps that came
    as events is finished by an event.
    """
    rows = await store.pool.fetch(_ENDED, rest_s)
    return [(row["trajectory_id"], row["key_id"]) for row in rows]


_TRAJECTORIES = """
SELECT DISTINCT ON (trace_id) trace_id, trajectory_id
FROM babylon.play_spans JOIN babylon.plays USING (trajectory_id)
WHERE trace_id = ANY($1::text[]) AND key_id = $2 ORDER BY trace_id, received_at
"""

_ADD = """
INSERT INTO babylon.play_spans (trace_id, span_id, trajectory_id, root, span)
VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING
"""

_KNOWN = """
SELECT count(*) FROM babylon.play_spans
JOIN unnest($1::text[], $2::text[]) AS sent (trace_id, span_id) USING (trace_id, span_id)
"""

_ENDED = """
SELECT s.trajectory_id, p.key_id FROM babylon.play_spans s
JOIN babylon.plays p USING (trajectory_id)
WHERE s.span IS NOT NULL
  AND NOT EXISTS (SELECT FROM babylon.play_steps e WHERE e.trajectory_id = s.trajectory_id)
GROUP BY s.trajectory_id, p.key_id
HAVING bool_or(s.root) OR max(s.received_at) < now() - make_interval(secs => $1)
"""
