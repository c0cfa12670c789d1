"""The claim of one window: lease, the stages' commits, and resuming after a crash.

Whatever happens, the window's row in Postgres holds the true state.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from uuid import uuid4

from babylon.core.artifacts import read_artifact
from babylon.core.errors import (
    ArtifactError,
    DatabaseError,
    ExperimentRunningError,
    FencedError,
    SupersededError,
    WindowNotReadyError,
    reason_of,
)
from babylon.core.failpoints import failpoint
from babylon.core.metrics import scored_metrics
from babylon.core.settings import WindowSettings
from babylon.core.types import Claim, Collected, Scored, Trained
from babylon.core.windows import DONE, IN_WORK, JUDGED_AGAIN, Window, WindowState
from babylon.stages.train import trained_from
from babylon.store import Store
from babylon.store.connection import UNREACHABLE, guarded, read_clock
from babylon.store.late import admit_late, free_for_training, note_late, store_collected
from babylon.store.market_outcomes import awaits_outcomes
from babylon.store.policies import policy_of_batch
from babylon.store.releases import supersede
from babylon.store.routes import superseded
from babylon.store.windows import claim_window, get_window, hold_lease, release, set_state

_PROCESS = uuid4().hex[:8]  # containers may share host name and process ids


@asynccontextmanager
async def claimed(store: Store, windows: WindowSettings, window: Window) -> AsyncIterator[Claim]:
    """Claim a window and renew its lease while the body runs.

    If the body raises, the window becomes ``skipped`` (``WindowNotReadyError``) or ``failed``, with
    the reason. A window whose checkpoint is committed stays ``trained``, with the reason, and the
    next run resumes it. A run that a signal stops leaves the window in the state it reached. A
    window that waits for an experiment, or whose parent no longer leads, is ``scored`` afterwards.

    Raises:
        AlreadyTrainedError: the window is done.
        WindowNotReadyError: rows or outcomes of the window may still arrive, or a recipe was asked
            for a window that is not done.
        FencedError: another worker took over the window and now owns its state.
    """
    if window.recipe:
        await _check_done(store, window)
    else:
        await _check_truth(store, windows, window)
    owner = f"{socket.gethostname()}:{os.getpid()}:{_PROCESS}"
    failpoint("claim.before")
    claim = await claim_window(
        store,
        window,
        owner=owner,
        lease_s=windows.lease_s,
        grace_s=windows.grace_s,
    )
    failpoint("claim.after")
    try:
        async with hold_lease(store, claim, windows.lease_s):
            if window.recipe:
                await _note_late(store, windows, claim, window)
            yield claim
    except FencedError:
        raise
    except BaseException as error:  # signals too: the reason is stored, the error raised again
        with suppress(*UNREACHABLE):  # without a database the lease expires by itself
            async with asyncio.timeout(windows.lease_s / 3):
                await _end(store, claim, error)
        raise


async def resume(
    store: Store, fingerprint: str, claim: Claim
) -> tuple[Scored | None, Trained | None]:
    """Return the manifests of ``score`` and ``train`` that an earlier run of the window committed.

    Scores are kept if ``fingerprint``, that of the present settings, is theirs, their artifact is
    intact and all of its play may be trained, so that an interrupted update resumes with the same
    batch. Without scores the window starts over: earlier stages are cheap, judgments are stored.

    Raises:
        SupersededError: the window's policy was never deployed, and its parent no longer leads.
    """
    row = await get_window(store, claim.window_id)
    assert row is not None  # it is claimed
    scored = replace(row.scored, claim=claim) if row.scored else None
    if row.state == WindowState.TRAINED:
        policy = await policy_of_batch(store, row.batch_id or "")
        if scored is None or policy is None:
            raise DatabaseError(
                f"window {claim.window_id} is trained, but its"
                f" {'scores are' if scored is None else f'policy ({row.batch_id}) is'} not stored"
            )
        if reason := await superseded(store, policy):
            raise SupersededError(f"policy {policy.policy_version}: {reason}")
        return scored, trained_from(store, claim, policy)
    if row.state == WindowState.SCORED:
        if scored and await _is_current(store, scored, fingerprint):
            return scored, None
        await set_state(store, claim, WindowState.CLAIMED)
    return None, None


async def commit_collected(store: Store, collected: Collected) -> None:
    """Commit stage ``collect``. Rows that arrive from now on are late."""
    rows = await asyncio.to_thread(read_artifact, store.home, collected.artifact, ["trajectory_id"])
    await store_collected(store, collected.claim, rows["trajectory_id"])


async def commit_scored(store: Store, scored: Scored) -> None:
    """Commit stage ``score``. A later run may resume from here."""
    metrics = scored_metrics(scored)
    await set_state(store, scored.claim, WindowState.SCORED, metrics=metrics, scored=scored)


async def _is_current(store: Store, scored: Scored, fingerprint: str) -> bool:
    if scored.fingerprint != fingerprint:
        return False
    columns = ["trajectory_id", "agent_id"]
    try:
        play = await asyncio.to_thread(read_artifact, store.home, scored.artifact, columns)
    except ArtifactError:
        return False
    # Play may have been taken down since, or trained by another recipe.
    return len(await free_for_training(store, *map(list, play[columns]))) == len(play)


async def _check_done(store: Store, window: Window) -> None:
    first = await get_window(store, window.id)
    if first is None or first.state not in DONE:
        raise WindowNotReadyError(
            f"recipe {window.recipe} needs a window that is done, and {window.id} is"
            f" {first.state if first else 'untrained'}: train it without --recipe first"
        )


async def _check_truth(store: Store, windows: WindowSettings, window: Window) -> None:
    clock = await read_clock(store)
    if why := await awaits_outcomes(store, window, clock.now, windows.outcomes_wait_s):
        raise WindowNotReadyError(f"window {window.id} is closing: {why}; train it later")


async def _note_late(store: Store, windows: WindowSettings, claim: Claim, window: Window) -> None:
    """Record the late rows before anything is collected; admit them with ``--include-late``."""
    await note_late(store, window.start, window.end)
    if windows.include_late and window.recipe != JUDGED_AGAIN:  # it trains nothing
        await admit_late(store, claim, window)


async def _end(store: Store, claim: Claim, error: BaseException) -> None:
    reason = reason_of(error)
    async with guarded(store, claim):  # raises FencedError if the claim was taken over
        pass
    row = await get_window(store, claim.window_id)
    if row is None or row.state not in IN_WORK | {WindowState.TRAINED}:
        return
    if not isinstance(error, Exception):  # cancelled or a signal: does not count as a failure
        await release(store, claim, "stopped by a signal", "stopped")
    elif isinstance(error, ExperimentRunningError):
        await release(store, claim, reason, "waits")
    elif isinstance(error, SupersededError):
        await supersede(store, claim, reason)
    elif row.state == WindowState.TRAINED:
        await release(store, claim, reason, "failed")
    else:
        skipped = isinstance(error, WindowNotReadyError)
        state = WindowState.SKIPPED if skipped else WindowState.FAILED
        await set_state(store, claim, state, reason=reason)
