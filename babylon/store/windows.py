"""The table ``windows``: claims with a lease and an epoch, heartbeat, states.

A claim raises the window's epoch, and every later write checks that epoch. A worker that slept
through its lease therefore cannot write after another worker took over. The lease only decides when
another worker may claim the window; the epoch is what refuses stale writes.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

import asyncpg
import msgspec

from babylon.core.errors import AlreadyTrainedError, FencedError, WindowError
from babylon.core.failpoints import failpoint
from babylon.core.types import Claim, Scored
from babylon.core.windows import (
    DONE,
    IN_WORK,
    MAX_ATTEMPTS,
    TRANSITIONS,
    Window,
    WindowState,
    backoff,
    check_settled,
)
from babylon.store.attempts import Ending, begin_attempt, end_attempt
from babylon.store.connection import UNREACHABLE, Connection, Store, affected, clock_of, guarded

_COLUMNS = (
    "window_id, minutes, state, epoch, owner, lease_until,"
    " coalesce(lease_until > now(), false) AS leased, attempts, retry_at, batch_id, reason,"
    " metrics, scored, updated_at"
)
MOST_SKIPS = MAX_ATTEMPTS // 2  # count as attempts: a skip gives up no window, and rests four hours
LEAST_RENEWAL_S = 1.0  # a busy process answers late, though its database answers at once
# States in which work is left, so that the worker keeps its lease.
_ACTIVE = IN_WORK | {WindowState.TRAINED}
_ENDINGS: dict[WindowState, Ending] = {
    WindowState.DEPLOYED: "deployed",
    WindowState.REJECTED: "rejected",
    WindowState.SKIPPED: "skipped",
    WindowState.FAILED: "failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRow:
    """A row of ``babylon.windows``.

    ``leased``: the lease runs, by the database's clock. ``attempts``: claims since the last one
    that committed or finished. The scheduler leaves the window alone until ``retry_at``.
    ``scored``: manifest of the last scoring.
    """

    window_id: str
    minutes: int
    state: WindowState
    epoch: int
    owner: str | None
    lease_until: datetime | None
    leased: bool
    attempts: int
    retry_at: datetime | None
    batch_id: str | None
    reason: str | None
    metrics: dict[str, Any]
    scored: Scored | None
    updated_at: datetime

    @property
    def lost(self) -> bool:
        """The worker died: its lease ended, and nobody ended its work."""
        return self.state in _ACTIVE and self.lease_until is not None and not self.leased


async def claim_window(
    store: Store, window: Window, *, owner: str, lease_s: float, grace_s: float = 0.0
) -> Claim:
    """Take a window for ``lease_s`` seconds.

    A scored or trained window keeps its state, so that the new owner continues there. Any other
    window starts again. An owner may claim its own window again. The database's clock decides
    whether the window is over.

    Raises:
        AlreadyTrainedError: the window was trained and deployed, or rejected, before.
        WindowNotReadyError: rows of the window may still arrive.
        WindowError: another owner's lease still runs, or the window has another length.
    """
    async with store.pool.acquire() as connection, connection.transaction():
        await connection.execute(
            "INSERT INTO babylon.windows (window_id, minutes) VALUES ($1, $2)"
            " ON CONFLICT DO NOTHING",
            window.key,
            window.minutes,
        )
        found = await connection.fetchrow(
            "SELECT state, minutes, owner, attempts, lease_until, lease_until > now() AS leased"
            " FROM babylon.windows WHERE window_id = $1 FOR NO KEY UPDATE",
            window.key,
        )
        assert found is not None
        _check_claimable(window, found, owner)
        if found["state"] != WindowState.TRAINED:  # it was settled when it was collected
            check_settled(window, await clock_of(connection), grace_s)
        taken = await connection.fetchrow(
            "UPDATE babylon.windows SET epoch = epoch + 1, owner = $2, lease_until = now() + $3,"
            " state = CASE WHEN state IN ('scored', 'trained') THEN state ELSE 'claimed' END,"
            " minutes = $4, reason = NULL, attempts = attempts + 1,"
            " retry_at = CASE WHEN state = 'trained' AND attempts > 0 THEN now() + $5 END,"
            " updated_at = now() WHERE window_id = $1 RETURNING epoch, state",
            window.key,
            owner,
            timedelta(seconds=lease_s),
            window.minutes,
            # A trained window goes before all others: one that kills its workers must not do so.
            backoff(found["attempts"] + 1),
        )
        assert taken is not None
        claim = Claim(window_id=window.key, epoch=taken["epoch"], owner=owner)
        await begin_attempt(connection, claim, taken["state"])
        return claim


@asynccontextmanager
async def hold_lease(store: Store, claim: Claim, lease_s: float) -> AsyncIterator[None]:
    """Renew the lease while the block runs; cancel the block when the lease is lost.

    The block shares the event loop with the heartbeat, so long computation belongs in a thread. An
    outage of the database that is shorter than the lease does no harm.

    Raises:
        FencedError: another worker took over, or no renewal succeeded for a whole lease.
    """
    body = asyncio.current_task()
    assert body is not None
    inside = True

    def cancel_body(heartbeat: asyncio.Task[None]) -> None:
        if inside and not heartbeat.cancelled():
            body.cancel()

    heartbeat = asyncio.create_task(_renew_until_lost(store, claim, lease_s))
    heartbeat.add_done_callback(cancel_body)
    try:
        yield
    except asyncio.CancelledError:
        if heartbeat.done() and (lost := heartbeat.exception()) and not body.uncancel():
            raise lost from None
        raise
    finally:
        inside = False
        heartbeat.cancel()
        await asyncio.gather(heartbeat, return_exceptions=True)


async def set_state(
    store: Store,
    claim: Claim,
    state: WindowState,
    *,
    reason: str = "",
    metrics: dict[str, Any] | None = None,
    scored: Scored | None = None,
) -> None:
    """Change the state as ``TRANSITIONS`` allows, and store reason, metrics and manifest.

    Metrics are added to the stored ones. Those of scoring replace them.

    Raises:
        FencedError: the claim is stale.
        WindowError: the present state does not allow this one.
    """
    failpoint("state.before")
    async with guarded(store, claim) as connection:
        await change_state(connection, claim, state)
        await connection.execute(
            "UPDATE babylon.windows SET reason = nullif($2, ''),"
            " metrics = CASE WHEN $4 THEN $3 ELSE metrics || $3 END,"
            " scored = coalesce($5, scored) WHERE window_id = $1",
            claim.window_id,
            reason,
            metrics or {},
            # Scoring begins anew: the metrics of an earlier attempt are no longer true.
            state == WindowState.SCORED,
            asdict(scored) if scored else None,
        )
        if ending := _ENDINGS.get(state):
            await end_attempt(connection, claim, ending, reason)
    failpoint("state.after")


async def release(
    store: Store, claim: Claim, reason: str, ending: Literal["failed", "stopped", "waits"]
) -> None:
    """Give the lease back and keep the state; ``reason`` says why the work stopped.

    After a failure the window waits before its next attempt. Other endings do not count as an
    attempt.

    Raises:
        FencedError: the claim is stale.
        WindowError: the window's work had ended before.
    """
    failpoint("release.before")
    async with guarded(store, claim) as connection:
        state, attempts = await _state_of(connection, claim)
        if state not in _ACTIVE:
            raise WindowError(f"window {claim.window_id} is {state}: nobody works on it")
        failed = ending == "failed"
        attempts = max(attempts, 1) if failed else max(attempts - 1, 0)
        await connection.execute(
            "UPDATE babylon.windows SET lease_until = NULL, reason = $2, updated_at = now(),"
            " attempts = $3, retry_at = now() + $4 WHERE window_id = $1",
            claim.window_id,
            reason,
            attempts,
            backoff(attempts) if failed else None,
        )
        await end_attempt(connection, claim, ending, reason)
    failpoint("release.after")


async def change_state(connection: Connection, claim: Claim, state: WindowState) -> None:
    """Change the state inside the caller's guarded transaction.

    A failure and a skip set the time of the next attempt. Every other end of a claim, and a commit,
    resets the number of attempts.

    Raises:
        WindowError: the present state does not allow this one.
    """
    current, attempts = await _state_of(connection, claim)
    if state not in TRANSITIONS[current]:
        raise WindowError(
            f"window {claim.window_id} is {current}: it cannot become {state}; see"
            " `babylon windows list`"
        )
    skipped = state == WindowState.SKIPPED
    gives_up = skipped or state == WindowState.FAILED
    if gives_up:  # this attempt counts, though `windows retry` may have set the number to 0
        attempts = max(min(attempts, MOST_SKIPS) if skipped else attempts, 1)
    elif state not in IN_WORK:
        attempts = 0
    await connection.execute(
        "UPDATE babylon.windows SET state = $2, updated_at = now(),"
        " lease_until = CASE WHEN $3 THEN lease_until END,"
        " attempts = $4, retry_at = now() + $5 WHERE window_id = $1",
        claim.window_id,
        state,
        state in _ACTIVE,
        attempts,
        backoff(attempts) if gives_up else None,
    )


async def _state_of(connection: Connection, claim: Claim) -> tuple[WindowState, int]:
    row = await connection.fetchrow(
        "SELECT state, attempts FROM babylon.windows WHERE window_id = $1", claim.window_id
    )
    assert row is not None  # the claim made it
    return WindowState(row["state"]), row["attempts"]


async def get_window(store: Store, window_id: str) -> WindowRow | None:
    """Return a window's row, ``None`` if it was never claimed."""
    row = await store.pool.fetchrow(
        f"SELECT {_COLUMNS} FROM babylon.windows WHERE window_id = $1", window_id
    )
    return None if row is None else _window_row(row)


async def list_windows(store: Store) -> list[WindowRow]:
    """Return every window that was ever claimed, oldest first."""
    rows = await store.pool.fetch(f"SELECT {_COLUMNS} FROM babylon.windows ORDER BY window_id")
    return [_window_row(row) for row in rows]


async def window_lengths(store: Store) -> dict[str, int]:
    """Return the minutes of every window that was ever claimed."""
    rows = await store.pool.fetch("SELECT window_id, minutes FROM babylon.windows")
    return {row["window_id"]: row["minutes"] for row in rows}


async def windows_in_work(store: Store) -> list[WindowRow]:
    """Return the windows that a worker holds, or held when it died."""
    rows = await store.pool.fetch(
        f"SELECT {_COLUMNS} FROM babylon.windows WHERE state = ANY($1)"
        " AND lease_until IS NOT NULL ORDER BY window_id",
        list(_ACTIVE),
    )
    return [_window_row(row) for row in rows]


async def lost_windows(store: Store) -> list[WindowRow]:
    """Return the windows whose lease ended without a word. A worker that stops gives it back."""
    return [row for row in await windows_in_work(store) if row.lost]


async def newest_windows(store: Store, limit: int) -> list[WindowRow]:
    """Return claimed windows, the newest first."""
    rows = await store.pool.fetch(
        f"SELECT {_COLUMNS} FROM babylon.windows ORDER BY window_id DESC LIMIT $1", limit
    )
    return [_window_row(row) for row in rows]


def _window_row(row: asyncpg.Record) -> WindowRow:
    scored = row["scored"] and msgspec.convert(row["scored"], Scored)
    return WindowRow(**{**row, "state": WindowState(row["state"]), "scored": scored})


def _check_claimable(window: Window, found: asyncpg.Record, owner: str) -> None:
    if found["state"] in DONE:
        raise AlreadyTrainedError(
            f"window {window.key} is {found['state']}: it was trained before, nothing was changed"
        )
    if found["leased"] and found["owner"] != owner:
        raise WindowError(
            f"window {window.key} is leased by {found['owner']} until"
            f" {found['lease_until']:%Y-%m-%d %H:%M:%S} UTC: wait, or stop that run"
        )
    if found["state"] == WindowState.TRAINED and found["minutes"] != window.minutes:
        raise WindowError(
            f"window {window.key} was trained with {found['minutes']} minutes, not"
            f" {window.minutes}: pass --window-minutes {found['minutes']} to finish it"
        )


async def _renew_until_lost(store: Store, claim: Claim, lease_s: float) -> None:
    """Renew the lease. A renewal without an answer is given up, and tried again.

    Raises:
        FencedError: the lease is over.
    """
    clock = asyncio.get_running_loop().time
    ends = clock() + lease_s
    while True:
        await asyncio.sleep(lease_s / 3)
        asked = clock()
        try:
            # Also after a stage that kept this loop busy for longer than the lease: the epoch, not
            # the clock, says if another worker took over.
            async with asyncio.timeout(max(lease_s / 3, LEAST_RENEWAL_S)):
                await _renew(store, claim, lease_s)
            ends = asked + lease_s
        except UNREACHABLE as error:
            if asked >= ends:  # and not a renewal that a busy loop was late to finish
                answer = str(error) or "the database gave no answer"
                raise FencedError(
                    f"window {claim.window_id}: {claim.owner} could not renew its lease of"
                    f" {lease_s:g} s ({answer}); it counts as lost"
                ) from error


async def _renew(store: Store, claim: Claim, lease_s: float) -> None:
    failpoint("lease.before")
    status = await store.pool.execute(
        "UPDATE babylon.windows SET lease_until = CASE WHEN state = ANY($4) THEN now() + $3 END"
        " WHERE window_id = $1 AND epoch = $2",  # a finished window needs no lease
        claim.window_id,
        claim.epoch,
        timedelta(seconds=lease_s),
        list(_ACTIVE),
    )
    failpoint("lease.after")
    if not affected(status):
        raise FencedError(
            f"window {claim.window_id}: epoch {claim.epoch} of {claim.owner} was taken over"
        )
