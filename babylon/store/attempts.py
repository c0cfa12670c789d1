"""The table ``attempts``: one row for each claim of a window, from its begin to its end.

The rows are written in the transactions that they describe. A worker that dies writes no end; the
next claim of the window closes its row as ``lost``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import asyncpg

from babylon.core.types import Claim
from babylon.core.windows import WindowState
from babylon.store.connection import Connection, Store

Ending = Literal[
    "deployed", "rejected", "skipped", "failed", "stopped", "waits", "superseded", "lost"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One claim of a window. ``ended_in`` is the state that it left; NULL fields: it has no end.

    Endings: the final states of a window; ``stopped`` by a signal; ``waits`` for an experiment;
    ``superseded``: another policy leads, so the window is trained again; ``lost``: the lease ended
    without a word, and another claim followed.
    """

    window_id: str
    epoch: int
    owner: str
    began_at: datetime
    began_from: WindowState
    ended_at: datetime | None
    ended_in: WindowState | None
    ending: Ending | None
    reason: str | None


async def begin_attempt(connection: Connection, claim: Claim, began_from: str) -> None:
    """Open the row of a claim, and close that of the claim before it, if its worker did not."""
    await connection.execute(
        "UPDATE babylon.attempts SET ended_at = now(), ending = 'lost', ended_in = $3,"
        " reason = 'its lease ended, and ' || $4 || ' took the window over'"
        " WHERE window_id = $1 AND epoch < $2 AND ended_at IS NULL",
        claim.window_id,
        claim.epoch,
        began_from,
        claim.owner,
    )
    await connection.execute(
        "INSERT INTO babylon.attempts (window_id, epoch, owner, began_from)"
        " VALUES ($1, $2, $3, $4)",
        claim.window_id,
        claim.epoch,
        claim.owner,
        began_from,
    )


async def end_attempt(connection: Connection, claim: Claim, ending: Ending, reason: str) -> None:
    """Close the row of a claim with the present state. The answer to an earlier end may be lost."""
    await connection.execute(
        "UPDATE babylon.attempts a SET ended_at = now(), ended_in = w.state, ending = $3,"
        " reason = nullif($4, '') FROM babylon.windows w"
        " WHERE a.window_id = $1 AND a.epoch = $2 AND w.window_id = $1",
        claim.window_id,
        claim.epoch,
        ending,
        reason,
    )


async def list_attempts(store: Store, window_ids: Iterable[str]) -> list[Attempt]:
    """Return the attempts of these windows, oldest first."""
    rows = await store.pool.fetch(
        "SELECT * FROM babylon.attempts WHERE window_id = ANY($1) ORDER BY window_id, epoch",
        list(window_ids),
    )
    return _attempts(rows)


async def attempts_since(store: Store, since: datetime) -> list[Attempt]:
    """Return the attempts that ended after a moment or have no end yet, in order of their begin."""
    rows = await store.pool.fetch(
        "SELECT * FROM babylon.attempts WHERE ended_at >= $1 OR ended_at IS NULL"
        " ORDER BY began_at, window_id",
        since,
    )
    return _attempts(rows)


def _attempts(rows: Iterable[asyncpg.Record]) -> list[Attempt]:
    return [
        Attempt(
            **{
                **row,
                "began_from": WindowState(row["began_from"]),
                "ended_in": row["ended_in"] and WindowState(row["ended_in"]),
            }
        )
        for row in rows
    ]
