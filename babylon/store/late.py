"""The tables ``collected`` and ``late``: rows that a window's collection saw, or missed.

When a window is trained, every untrained row of it that its collection did not see is noted as
late, with the time of the note. A late row is collected only by a recipe that asks for late rows;
it is then admitted to that recipe's window.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from babylon.core.failpoints import failpoint
from babylon.core.game_rows import FOR_TRAINING, UNTRAINED
from babylon.core.types import Claim
from babylon.core.windows import FINISHED, ID_FORMAT, Window, WindowState
from babylon.store.connection import Store, affected, guarded
from babylon.store.session import in_batches
from babylon.store.windows import change_state

_BATCH = 10_000
_STATES = [str(state) for state in FINISHED]
_FINISHED = """
SELECT window_id, minutes FROM babylon.windows
WHERE state = ANY($1) AND collected_at IS NOT NULL AND position('+' IN window_id) = 0
  AND ($2::text IS NULL OR window_id >= $2) AND ($3::text IS NULL OR window_id < $3)
"""

# The game's tables may be in another database. So its rows are read first, then compared here. For
# one window Postgres finds them by index; for all windows it joins by hash, once for each length of
# windows, and reads the narrow columns once. A row may lie in finished windows of two lengths.
# OFFSET 0: else the planner, which expects many lengths, compares each row with each window.
_PLAYED = """
WITH finished AS (
    SELECT window_id, minutes, window_id::timestamp AS start
    FROM unnest($1::text[], $2::int[]) AS w (window_id, minutes)
)
SELECT "trajectoryId", string_agg(window_id, ' '), min("createdAt"), min("agentId")
FROM (
    SELECT t."trajectoryId", t."createdAt", t."agentId", length.minutes,
        CASE WHEN isfinite(t."startTime") THEN date_bin(
            make_interval(mins => length.minutes), t."startTime", '2000-01-01') END AS start
    FROM (SELECT DISTINCT minutes FROM finished) AS length
    CROSS JOIN trajectories t
    WHERE t."startTime" >= coalesce($3, '-infinity'::timestamptz) AT TIME ZONE 'UTC'
      AND t."startTime" < coalesce($4, 'infinity'::timestamptz) AT TIME ZONE 'UTC'
      AND {condition}
    OFFSET 0
) AS play JOIN finished USING (minutes, start)
GROUP BY "trajectoryId"
"""
_PLAYED_HERE = _PLAYED.format(condition=UNTRAINED)
# Another database knows nothing of `babylon.trained`, so all of the game's rows are read.
_PLAYED_ELSEWHERE = _PLAYED.format(condition=FOR_TRAINING)

# Play that was taken down teaches no policy.
_ALLOWED = """NOT EXISTS (SELECT FROM babylon.withheld w WHERE (w.kind, w.name) IN
    (('agent', t.agent_id), ('trajectory', t.trajectory_id)))"""

# A row is late if none of its windows collected it.
_MISSED = f"""
SELECT t.trajectory_id, min(w.window_id) AS window_id,
       CASE WHEN min(t.created_at) AT TIME ZONE 'UTC' < min(w.collected_at)
            THEN 'committed late' ELSE 'written late' END AS reason
FROM unnest($1::text[], $2::text[], $3::timestamp[], $4::text[])
    t (trajectory_id, windows, created_at, agent_id)
JOIN babylon.windows w ON w.window_id = ANY(string_to_array(t.windows, ' '))
LEFT JOIN babylon.collected c USING (window_id, trajectory_id)
WHERE NOT EXISTS (SELECT FROM babylon.trained d WHERE d.trajectory_id = t.trajectory_id)
  AND NOT EXISTS (SELECT FROM babylon.late l WHERE l.trajectory_id = t.trajectory_id)
  AND {_ALLOWED}
GROUP BY t.trajectory_id
HAVING bool_and(c IS NULL)
ORDER BY 1
"""
# Rows are inserted in the order of their ids, so that two simultaneous notes cannot deadlock.
_NOTE = (
    f"INSERT INTO babylon.late (trajectory_id, window_id, reason) {_MISSED} ON CONFLICT DO NOTHING"
)

_FREE = f"""
SELECT t.trajectory_id FROM unnest($1::text[], $2::text[]) t (trajectory_id, agent_id)
WHERE NOT EXISTS (SELECT FROM babylon.trained d WHERE d.trajectory_id = t.trajectory_id)
  AND NOT EXISTS (SELECT FROM babylon.late l
                  WHERE l.trajectory_id = t.trajectory_id AND l.admitted_to IS NULL)
  AND {_ALLOWED}
"""

_AGENTS = """
SELECT "trajectoryId", "agentId" FROM trajectories WHERE "trajectoryId" = ANY($1::text[])
"""
_IN_PLACE = f"""
SELECT t.trajectory_id FROM unnest($1::text[], $2::text[]) t (trajectory_id, agent_id)
WHERE {_ALLOWED}
"""

_FINISHED_PLAY = """
SELECT coalesce(range_agg(tsrange(start, start + make_interval(mins => minutes))), '{}')::text
FROM babylon.windows, LATERAL (SELECT left(window_id, 16)::timestamp AS start) AS s
WHERE state = ANY($1) AND position('+' IN window_id) = 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRow:
    """``reason``: written late, or committed late by a transaction that began in time.

    ``seen_at`` is None until a training run notes the row.
    """

    window_id: str
    trajectory_id: str
    reason: str
    seen_at: datetime | None = None
    admitted_to: str | None = None


async def store_collected(store: Store, claim: Claim, trajectory_ids: Iterable[str]) -> None:
    """Move the window to ``collected``; these trajectories can no longer become late.

    Raises:
        FencedError: the claim is stale.
    """
    failpoint("collected.before")
    async with guarded(store, claim) as connection:
        await connection.execute(
            "DELETE FROM babylon.collected WHERE window_id = $1", claim.window_id
        )
        await connection.copy_records_to_table(
            "collected",
            schema_name="babylon",
            columns=("window_id", "trajectory_id"),
            records=((claim.window_id, trajectory_id) for trajectory_id in trajectory_ids),
        )
        await change_state(connection, claim, WindowState.COLLECTED)
        await connection.execute(
            # Of an earlier attempt: they are not true of what is collected now.
            "UPDATE babylon.windows SET collected_at = now(), metrics = '{}' WHERE window_id = $1",
            claim.window_id,
        )
    failpoint("collected.after")


async def note_late(
    store: Store, since: datetime | None = None, until: datetime | None = None
) -> int:
    """Note the late rows of finished windows that start in ``[since, until)``.

    Returns:
        The number of newly noted rows.
    """
    noted = 0
    async for rows in _played(store, since, until):
        noted += affected(await store.pool.execute(_NOTE, *rows))
    return noted


async def missed_rows(
    store: Store, since: datetime | None = None, until: datetime | None = None
) -> list[LateRow]:
    """Return the rows that ``note_late`` would note. Nothing is written."""
    return [
        LateRow(**row)
        async for rows in _played(store, since, until)
        for row in await store.pool.fetch(_MISSED, *rows)
    ]


async def _played(
    store: Store, since: datetime | None, until: datetime | None
) -> AsyncIterator[Iterable[list[object]]]:
    """Yield the game's rows of finished windows in batches, by column."""
    ids = [None if moment is None else f"{moment:{ID_FORMAT}}" for moment in (since, until)]
    finished = await store.pool.fetch(_FINISHED, _STATES, *ids)
    if not finished:
        return
    arguments = (*map(list, zip(*finished, strict=True)), since, until)
    query = _PLAYED_HERE if store.game is store.pool else _PLAYED_ELSEWHERE
    async with store.game.acquire() as connection, connection.transaction(readonly=True):
        async for rows in in_batches(connection, query, *arguments, size=_BATCH):
            yield map(list, zip(*rows, strict=True))


async def finished_play(store: Store) -> str:
    """Return the time of all finished windows, of any length, as a ``tsmultirange``.

    Play in it is never part of another window. What its window did not train is for recipes.
    """
    play: str = await store.pool.fetchval(_FINISHED_PLAY, _STATES)
    return play


async def free_for_training(
    store: Store, trajectory_ids: Sequence[str], agents: Sequence[str]
) -> set[str]:
    """Return those that were never trained nor taken down, and are not late or are admitted."""
    rows = await store.pool.fetch(_FREE, list(trajectory_ids), list(agents))
    return {row[0] for row in rows}


async def without_taken_down(store: Store, trajectory_ids: Iterable[str]) -> list[str]:
    """Return the trajectories that are in the game and were not taken down."""
    rows = await store.game.fetch(_AGENTS, list(trajectory_ids))
    columns = ([row[at] for row in rows] for at in (0, 1))
    return [row[0] for row in await store.pool.fetch(_IN_PLACE, *columns)]


async def count_late(store: Store, window_id: str) -> int:
    """Return the number of late rows of a window that no recipe admitted."""
    count: int = await store.pool.fetchval(
        "SELECT count(*) FROM babylon.late WHERE window_id = $1 AND admitted_to IS NULL", window_id
    )
    return count


async def list_late(store: Store, window_id: str | None = None) -> list[LateRow]:
    """Return the late rows of a window, or of all windows, admitted or not."""
    rows = await store.pool.fetch(
        "SELECT window_id, trajectory_id, reason, seen_at, admitted_to FROM babylon.late"
        " WHERE $1::text IS NULL OR window_id = $1 ORDER BY window_id, trajectory_id",
        window_id,
    )
    return [LateRow(**row) for row in rows]


async def admit_late(store: Store, claim: Claim, window: Window) -> int:
    """Admit a window's late rows to the recipe that holds the claim; return their number.

    Raises:
        FencedError: the claim is stale.
    """
    async with guarded(store, claim) as connection:
        return affected(
            await connection.execute(
                "UPDATE babylon.late SET admitted_to = $2"
                " WHERE window_id = $1 AND admitted_to IS NULL",
                window.id,
                claim.window_id,
            )
        )
