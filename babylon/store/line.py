"""The table ``line``: one window at a time trains, validates and deploys.

Two windows that train at once from one champion make siblings, of which only one can serve. The
line saves the update that would be wasted. It is no proof: the comparisons of the parent in
``commit_policy`` and ``commit_route`` are, and they hold without the line.

A window holds the line while its own lease runs under the epoch of the claim that took the line.
So the heartbeat of the window is that of the line, and a dead holder frees both.
"""

from dataclasses import dataclass

from babylon.core.failpoints import failpoint
from babylon.core.types import Claim
from babylon.core.windows import MAX_ATTEMPTS, WindowState
from babylon.store.connection import Store, guarded


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """A window that goes first. ``half_finished``: no run works on it, so the caller finishes it.

    ``reason`` is for the log.
    """

    window_id: str
    minutes: int
    half_finished: bool
    reason: str


async def take_line(store: Store, claim: Claim) -> Before | None:
    """Take the line for a window, or return the window that goes before it.

    The order is: the holder; then windows whose policy is committed; then the oldest of the windows
    that wait for the line. A window that rests after a failure holds nobody up.

    Raises:
        FencedError: the claim is stale.
    """
    failpoint("line.before")
    async with guarded(store, claim) as connection:
        await connection.execute("SELECT FROM babylon.line FOR UPDATE")
        before = await connection.fetchrow(_BEFORE, claim.window_id, list(_REASONS))
        if before is None:
            await connection.execute(
                "UPDATE babylon.line SET window_id = $1, epoch = $2", claim.window_id, claim.epoch
            )
    failpoint("line.after")
    if before is None:
        return None
    return Before(
        window_id=before["window_id"],
        minutes=before["minutes"],
        half_finished=before["place"] == "half-finished",
        reason=_REASONS[before["place"]].format(**before),
    )


_REASONS = {
    "holder": "{owner} trains window {window_id}",
    "committed": "{owner} finishes window {window_id}",
    "half-finished": "window {window_id} is half-finished: it is validated and deployed first",
    "older": "window {window_id}, of {owner}, is older",
}
"""The places before a window, in their order."""

# A window that is itself trained waits for the holder alone. The states are read after the lock on
# the line, so two windows never take it at once.
_BEFORE = f"""
SELECT w.window_id, w.minutes, w.owner, place
FROM babylon.windows w
JOIN babylon.windows own ON own.window_id = $1
CROSS JOIN babylon.line,
LATERAL (SELECT coalesce(w.lease_until > clock_timestamp(), false) AS leased) AS lease,
LATERAL (SELECT CASE
    WHEN leased AND line.window_id = w.window_id AND line.epoch = w.epoch THEN 'holder'
    WHEN own.state = '{WindowState.TRAINED}' THEN NULL
    WHEN w.state = '{WindowState.TRAINED}' AND leased THEN 'committed'
    WHEN w.state = '{WindowState.TRAINED}'
        AND w.attempts < {MAX_ATTEMPTS}
        AND coalesce(w.retry_at, '-infinity') <= clock_timestamp() THEN 'half-finished'
    WHEN w.state = '{WindowState.SCORED}' AND leased AND w.window_id < own.window_id THEN 'older'
    END AS place) AS placed
WHERE w.window_id <> $1 AND w.state IN ('{WindowState.SCORED}', '{WindowState.TRAINED}')
  AND place IS NOT NULL
ORDER BY array_position($2::text[], place), w.window_id
LIMIT 1
"""
