"""The tables ``collected`` and ``late``: rows that a window's collection saw, or missed.

When a window is trained, every untrained row of it that its collection did not see is noted as
late, with the time of the note. A late row is collected only by a recipe that asks for late rows;
it is then admitted to that recipe's window.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from babylon.core.failpoints import failpoint
from babylon.core.game_rows import UNTRAINED
from babylon.core.types import Claim
from babylon.core.windows import FINISHED, ID_FORMAT, Window, WindowState
from babylon.store.connection import Store, affected, guarded
from babylon.store.windows import change_state

# A row without a window id belongs to the window of its start time. For one window Postgres finds
# the rows by index; for all windows it joins by hash and reads the narrow columns once. Rows are
# inserted in the order of their ids, so that two simultaneous notes cannot deadlock.
_NOTE = f"""
INSERT INTO babylon.late (trajectory_id, window_id, reason)
WITH finished AS (
    SELECT window_id, collected_at FROM babylon.windows
    WHERE state = ANY($6) AND collected_at IS NOT NULL AND position('+' IN window_id) = 0
      AND ($1::text IS NULL OR window_id >= $1) AND ($2::text IS NULL OR window_id < $2)
), untrained AS (
    SELECT t."trajectoryId", t."createdAt", w.window_id, w.collected_at
    FROM finished w JOIN trajectories t ON t."windowId" = w.window_id WHERE {UNTRAINED}
    UNION ALL
    SELECT t."trajectoryId", t."createdAt", w.window_id, w.collected_at
    FROM finished w JOIN trajectories t ON w.window_id = to_char(date_bin(
        make_interval(mins => $5), t."startTime", '2000-01-01'), 'YYYY-MM-DD"T"HH24:MI')
    WHERE t."windowId" IS NULL AND isfinite(t."startTime")
      AND t."startTime" >= coalesce($3, '-infinity'::timestamptz) AT TIME ZONE 'UTC'
      AND t."startTime" < coalesce($4, 'infinity'::timestamptz) AT TIME ZONE 'UTC'
      AND {UNTRAINED}
)
SELECT u."trajectoryId", u.window_id,
       CASE WHEN u."createdAt" AT TIME ZONE 'UTC' < u.collected_at
            THEN 'committed late' ELSE 'written late' END
FROM untrained u
WHERE NOT EXISTS (SELECT FROM babylon.collected c
                  WHERE c.window_id = u.window_id AND c.trajectory_id = u."trajectoryId")
ORDER BY 1
ON CONFLICT DO NOTHING
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRow:
    """``reason``: written late, or committed late by a transaction that began in time."""

    window_id: str
    trajectory_id: str
    reason: str
    seen_at: datetime
    admitted_to: str | None


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
            "UPDATE babylon.windows SET collected_at = now() WHERE window_id = $1", claim.window_id
        )
    failpoint("collected.after")


async def note_late(
    store: Store, minutes: int, since: datetime | None = None, until: datetime | None = None
) -> int:
    """Note the late rows of finished windows that start in ``[since, until)``.

    ``minutes`` is the length of a window, for rows without a window id.

    Returns:
        The number of newly noted rows.
    """
    ids = [None if moment is None else f"{moment:{ID_FORMAT}}" for moment in (since, until)]
    states = [str(state) for state in FINISHED]
    return affected(await store.pool.execute(_NOTE, *ids, since, until, minutes, states))


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
