"""One window's claim from start to end: whatever happens, its row in Postgres tells the truth."""

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from uuid import uuid4

from babylon.core.artifacts import read_artifact
from babylon.core.errors import ArtifactError, DatabaseError, FencedError, WindowNotReadyError
from babylon.core.failpoints import failpoint
from babylon.core.metrics import scored_from, scored_metrics
from babylon.core.settings import Settings
from babylon.core.types import Claim, Collected, Scored, Trained
from babylon.core.windows import DONE, IN_WORK, Window, WindowState
from babylon.stages.train import trained_from
from babylon.store import Store
from babylon.store.connection import UNREACHABLE, guarded
from babylon.store.late import admit_late, note_late, store_collected
from babylon.store.policies import policy_of_batch
from babylon.store.windows import (
    WindowRow,
    claim_window,
    get_window,
    hold_lease,
    release,
    set_state,
)

_PROCESS = uuid4().hex[:8]  # containers may share host name and process ids


@asynccontextmanager
async def claimed(store: Store, settings: Settings, window: Window) -> AsyncIterator[Claim]:
    """Claim a window and keep its lease while the body runs.

    A body that raises leaves the window skipped (``WindowNotReadyError``) or failed, with the
    reason. A window whose checkpoint is committed stays ``trained``, with the reason and free for
    the next run, which goes on there; so does, in its stage, one whose run was told to stop.

    Raises:
        AlreadyTrainedError: the window is done.
        WindowNotReadyError: rows of it may still arrive; or a recipe wants a window that is not
            done.
        FencedError: another worker took the window over; its state is that worker's.
    """
    if window.recipe:
        await _check_done(store, window)
    owner = f"{socket.gethostname()}:{os.getpid()}:{_PROCESS}"
    failpoint("claim.before")
    claim = await claim_window(
        store,
        window,
        owner=owner,
        lease_s=settings.windows.lease_s,
        grace_s=settings.windows.grace_s,
    )
    failpoint("claim.after")
    try:
        async with hold_lease(store, claim, settings.windows.lease_s):
            if window.recipe:
                await _take_late(store, settings, claim, window)
            yield claim
    except FencedError:
        raise
    except BaseException as error:  # a signal too; re-raised, only the reason is kept
        with suppress(*UNREACHABLE):  # then the lease runs out by itself
            await _end(store, claim, error)
        raise


async def taken_up(
    store: Store, settings: Settings, claim: Claim
) -> tuple[Scored | None, Trained | None]:
    """What an earlier run of this window had scored, and trained, before it died.

    Scores are taken up as they are if the settings are the same and the artifact is what was
    written, so that an update that had begun goes on with the very batch that it began with. Any
    earlier stage is cheap and repeated; judgments are kept apart and never bought twice.
    """
    row = await get_window(store, claim.window_id)
    assert row is not None  # it is claimed
    if row.state == WindowState.TRAINED:
        policy = await policy_of_batch(store, row.batch_id or "")
        if policy is None:
            raise DatabaseError(
                f"window {claim.window_id} is trained but batch {row.batch_id!r} has no policy"
            )
        return scored_from(claim, row.metrics), trained_from(claim, policy)
    if row.state == WindowState.SCORED:
        if await _stands(row, settings, scored := scored_from(claim, row.metrics)):
            return scored, None
        await set_state(store, claim, WindowState.CLAIMED)
    return None, None


async def commit_collected(store: Store, manifest: Collected) -> None:
    """Commit stage ``collect``: from now on whatever else arrives is late."""
    rows = await asyncio.to_thread(read_artifact, manifest.artifact, ["trajectory_id"])
    await store_collected(store, manifest.claim, rows["trajectory_id"])


async def commit_scored(store: Store, settings: Settings, manifest: Scored) -> None:
    """Commit stage ``score``: a later run may go on from here."""
    metrics = {**scored_metrics(manifest), "settings": _digest(settings)}
    await set_state(store, manifest.claim, WindowState.SCORED, metrics=metrics)


def _digest(settings: Settings) -> str:
    """Of every setting, so that none is forgotten; secrets are masked in it."""
    return hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:16]


async def _stands(row: WindowRow, settings: Settings, manifest: Scored) -> bool:
    if row.metrics.get("settings") != _digest(settings):
        return False
    try:
        await asyncio.to_thread(read_artifact, manifest.artifact, ["trajectory_id"])
    except ArtifactError:
        return False
    return True


async def _check_done(store: Store, window: Window) -> None:
    first = await get_window(store, window.id)
    if first is None or first.state not in DONE:
        raise WindowNotReadyError(
            f"recipe {window.recipe} takes up windows that are done, and {window.id} is"
            f" {first.state if first else 'untrained'}: train it without --recipe first"
        )


async def _take_late(store: Store, settings: Settings, claim: Claim, window: Window) -> None:
    """Late rows are noted before anything is collected, and admitted only where asked for."""
    await note_late(store, window.minutes, window.start, window.end)
    if settings.windows.include_late:
        await admit_late(store, claim, window)


async def _end(store: Store, claim: Claim, error: BaseException) -> None:
    reason = str(error) or type(error).__name__
    async with guarded(store, claim):  # who was fenced hears of that, whatever else it led to
        pass
    row = await get_window(store, claim.window_id)
    if row is None or row.state not in IN_WORK | {WindowState.TRAINED}:
        return
    if not isinstance(error, Exception):  # cancelled, or a signal: nobody's failure
        await release(store, claim, f"stopped: {reason}", failed=False)
    elif row.state == WindowState.TRAINED:
        await release(store, claim, reason, failed=True)
    else:
        skipped = isinstance(error, WindowNotReadyError)
        state = WindowState.SKIPPED if skipped else WindowState.FAILED
        await set_state(store, claim, state, reason=reason)
