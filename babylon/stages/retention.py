"""Removal of checkpoints that are no longer needed.

A policy's row stays forever; only its directory is deleted. The row is marked first and the
directory deleted after it, so a crash in between leaves a directory, which the next sweep deletes,
but never a row without its weights. A directory without a row is deleted once its claim can no
longer commit.
"""

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from babylon.core.artifacts import remove_unfinished
from babylon.core.errors import ArtifactError, ModelError, StorageError
from babylon.core.failpoints import failpoint
from babylon.core.home import Home
from babylon.core.objects import fetch, names, remove
from babylon.core.settings import Settings
from babylon.core.windows import IN_WORK, WindowState
from babylon.policies.checkpoint_files import adapter_base
from babylon.stages.in_use import kept
from babylon.store.backup_lock import retention_lock
from babylon.store.checkpoints_in_use import (
    Held,
    WorkedWindow,
    checkpoints,
    holding,
    mark_removed,
    worked_windows,
)
from babylon.store.connection import Store, read_now
from babylon.store.experiments import forget_arms

log = logging.getLogger(__name__)
UNFINISHED_S = 3600.0  # an artifact in progress is written to far more often
# Hidden directories are unfinished; their names have a random suffix.
_CLAIM = re.compile(
    r"(?P<hidden>\.)?(?P<hour>\d{4}-\d{2}-\d{2}T\d{2})(?P<minute>\d{2})(?P<recipe>\+[a-z0-9-]+)?"
    r"-e(?P<epoch>\d+)(?P<member>-m\d+)?(?(hidden)-\w+)"
)
_RESUMABLE = IN_WORK | {WindowState.FAILED}


async def retire_checkpoints(store: Store, settings: Settings) -> tuple[int, ...]:
    """Delete unneeded checkpoints and return their policy versions.

    A directory that cannot be deleted is logged and tried again by the next retention.

    Raises:
        ModelError: an adapter does not name its base model. Only what belongs to no policy was
            deleted.
    """
    failpoint("retire.before")
    async with retention_lock(store) as other:
        if other:
            log.info("%s runs: this one removes no checkpoint", other)
            return ()
        return await _retire(
            store,
            settings.home,
            number=settings.deployment.keep_checkpoints,
            lookback_hours=settings.windows.lookback_hours,
        )


async def _retire(store: Store, home: Home, *, number: int, lookback_hours: int) -> tuple[int, ...]:
    gone: tuple[int, ...] = ()
    unreadable: ModelError | None = None
    try:
        gone = await _mark(store, home, number=number)
    except ModelError as error:  # the progress of failed updates must not pile up meanwhile
        unreadable = error
    failpoint("retire.marked")
    await sweep(store, home, lookback_hours)
    await forget_arms(store, timedelta(hours=lookback_hours))
    for place in (home.artifacts, home.datasets):
        await asyncio.to_thread(remove_unfinished, place, UNFINISHED_S)
    if unreadable:
        raise unreadable
    return gone


async def _mark(store: Store, home: Home, *, number: int) -> tuple[int, ...]:
    """Mark the policies whose checkpoints are no longer needed, and return their versions."""
    async with holding(store) as (_, before):
        pass
    # Another machine's adapters are fetched before the lock, under which no policy can be deployed.
    await asyncio.to_thread(adapter_bases, home, before.policies)
    async with holding(store) as (connection, holdings):
        bases = await asyncio.to_thread(adapter_bases, home, holdings.policies)
        keep = kept(holdings, bases, number=number)
        gone = tuple(
            held.policy_version
            for held in holdings.policies
            if not held.removed
            and held.policy_version not in keep
            and is_ours(home, Path(held.uri))
        )
        await mark_removed(connection, gone)
    return gone


def adapter_bases(home: Home, policies: Iterable[Held]) -> dict[int, str]:
    """Return version of each present adapter → its base model, from its configuration. Blocking.

    Raises:
        ModelError: an adapter does not name its base model, which could be any checkpoint.
    """
    bases = {}
    for held in policies:
        if held.removed:
            continue
        try:
            if held.kind == "lora" and is_ours(home, Path(held.uri)):
                fetch(home, Path(held.uri))
            base = adapter_base(held.uri)
        except (ArtifactError, ModelError) as error:
            raise ModelError(
                f"no checkpoint was removed, policy {held.policy_version}: {error}: restore the"
                " file, or delete that directory"
            ) from error
        if base is not None:
            bases[held.policy_version] = base
    return bases


def is_ours(home: Home, directory: Path) -> bool:
    """Return True for a directory directly below the home's ``checkpoints``; others are kept."""
    return not directory.is_symlink() and directory.parent == home.checkpoints


async def sweep(store: Store, home: Home, lookback_hours: float) -> None:
    """Delete directories of removed policies and of claims that can no longer commit.

    The order matters. Directories are listed first, so that every claim that made one is known.
    Windows are read before policies, so that the policy of a trained window is known. A checkpoint
    also counts as known by its name alone, because its row may name this home by another path.
    """
    found = await asyncio.to_thread(_listed, home)
    windows = await worked_windows(store)
    removed = {Path(uri): gone for uri, gone in (await checkpoints(store)).items()}
    held = {path.name for path, gone in removed.items() if not gone}
    oldest = await read_now(store) - timedelta(hours=lookback_hours)
    for path in found:
        if path in removed:
            over = removed[path]
        elif path.parent == home.checkpoints and path.name in held:
            over = False
        elif maker := _maker(path):
            over = maker.is_over(windows, path.parent == home.progress, oldest)
        else:  # not made by us
            over = False
        if over:
            await asyncio.to_thread(_delete, home, path)


@dataclass(frozen=True, slots=True)
class _Maker:
    """The claim that a directory is named after; ``sibling``: of a population's member."""

    window_id: str
    epoch: int
    sibling: bool

    def is_over(
        self, windows: Mapping[str, WorkedWindow], in_progress: bool, oldest: datetime
    ) -> bool:
        """Return True if the directory is no longer needed.

        A checkpoint is committed under the epoch that began it, or never. The progress of an update
        and the siblings of a window are used by the next claim, as long as windows of that age are
        trained at all.
        """
        window = windows.get(self.window_id)
        if window is None:  # of another database
            return False
        if in_progress or self.sibling:
            return window.state not in _RESUMABLE or window.updated_at < oldest
        return self.epoch < window.epoch or window.state not in IN_WORK


def _maker(path: Path) -> _Maker | None:
    match = _CLAIM.fullmatch(path.name)
    if match is None:
        return None
    window_id = f"{match['hour']}:{match['minute']}{match['recipe'] or ''}"
    finished_sibling = bool(match["member"] and not match["hidden"])
    return _Maker(window_id, int(match["epoch"]), finished_sibling)


def _listed(home: Home) -> list[Path]:
    return [
        path
        for place in (home.checkpoints, home.progress)
        for path in names(home, place)
        if (path.is_dir() or not path.exists()) and not path.is_symlink()
    ]


def _delete(home: Home, directory: Path) -> None:
    try:
        failpoint("retire.deleting")
        remove(home, directory)
        failpoint("retire.deleted")
        log.debug("%s is deleted", directory)
    except FileNotFoundError:  # the sweep of another window deleted it
        return
    except (OSError, StorageError) as error:
        log.error(
            "%s cannot be deleted (%s): fix the cause, or delete it by hand; the next"
            " retention tries again",
            directory,
            error,
        )
