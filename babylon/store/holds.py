"""The table ``holds``: an operator stops the choice of windows, and lets it go on."""

from dataclasses import dataclass
from datetime import datetime

from babylon.store.connection import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingHold:
    """A hold without an end."""

    author: str
    reason: str
    since: datetime

    def __str__(self) -> str:
        return (
            f"training is on hold since {self.since:%Y-%m-%d %H:%M} UTC by {self.author}:"
            f" {self.reason} (`babylon windows resume`)"
        )


async def hold(store: Store, author: str, reason: str) -> TrainingHold:
    """Begin a hold. One that runs goes on with its own reason."""
    row = await store.pool.fetchrow(
        # An update of nothing returns the row that runs, also if it was made a moment ago.
        "INSERT INTO babylon.holds (author, reason) VALUES ($1, $2)"
        " ON CONFLICT ((true)) WHERE ended_at IS NULL DO UPDATE SET reason = holds.reason"
        " RETURNING author, reason, since",
        author,
        reason,
    )
    assert row is not None  # inserted or found
    return TrainingHold(**row)


async def released_windows(store: Store, author: str, window_id: str, days: int) -> list[str]:
    """Return the windows that holds of this author named, and that were let go on.

    That is ``window_id`` itself, and windows which were trained since, if their hold ended within
    ``days``. A window that a person skipped is not among them.
    """
    rows = await store.pool.fetch(
        "SELECT DISTINCT w.window_id FROM babylon.holds h JOIN babylon.windows w"
        " ON position(w.window_id IN h.reason) > 0 WHERE h.author = $1 AND h.ended_at IS NOT NULL"
        " AND (w.window_id = $2 OR w.state <> 'skipped'"
        " AND h.ended_at > now() - make_interval(days => $3))",
        author,
        window_id,
        days,
    )
    return [row["window_id"] for row in rows]


async def running_hold(store: Store) -> TrainingHold | None:
    row = await store.pool.fetchrow(
        "SELECT author, reason, since FROM babylon.holds WHERE ended_at IS NULL"
    )
    return TrainingHold(**row) if row else None


async def end_hold(store: Store, author: str) -> bool:
    """End the hold. Return False if there is none."""
    ended = await store.pool.fetchval(
        "UPDATE babylon.holds SET ended_at = now(), ended_by = $1 WHERE ended_at IS NULL"
        " RETURNING true",
        author,
    )
    return bool(ended)
