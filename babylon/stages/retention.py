"""Which checkpoints stay on the disk, and the removal of the others.

A policy's row stays for ever; its directory goes when nobody can need it any more. The row is
marked first and the directory deleted after: a crash in between leaves a directory that the next
window's sweep deletes, never a row that promises weights which are not there. Directories that no
row refers to are swept once their claim cannot commit any more.
"""

import asyncio
import json
import logging
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from babylon.core.artifacts import remove_unfinished
from babylon.core.errors import ModelError
from babylon.core.failpoints import failpoint
from babylon.core.settings import Settings
from babylon.core.windows import IN_WORK, WindowState
from babylon.store.checkpoints_in_use import (
    Held,
    Holdings,
    WorkedWindow,
    checkpoints,
    holding,
    mark_removed,
    worked_windows,
)
from babylon.store.connection import Store
from babylon.store.experiments import forget_arms
from babylon.store.lineage import staleness
from babylon.store.routes import champions

log = logging.getLogger(__name__)
UNFINISHED_S = 3600.0  # nobody takes so long from one row group of an artifact to the next
# Hidden ones are unfinished, and end in a name of their own.
_CLAIM = re.compile(
    r"(?P<hidden>\.)?(?P<hour>\d{4}-\d{2}-\d{2}T\d{2})(?P<minute>\d{2})(?P<recipe>\+[a-z0-9-]+)?"
    r"-e(?P<epoch>\d+)(?(hidden)-\w+)"
)
_RESUMABLE = IN_WORK | {WindowState.FAILED}


async def retire_checkpoints(store: Store, settings: Settings) -> tuple[int, ...]:
    """Remove what nobody needs; returns the policy versions whose checkpoints went.

    A directory that cannot be deleted is logged, and tried again after the next window.
    """
    failpoint("retire.before")
    async with holding(store) as (connection, holdings):
        bases = await asyncio.to_thread(adapter_bases, holdings.policies)
        keep = kept(
            holdings,
            bases,
            number=settings.deployment.keep_checkpoints,
            max_staleness=settings.training.max_staleness,
        )
        gone = tuple(
            held.policy_version
            for held in holdings.policies
            if not held.removed
            and held.policy_version not in keep
            and is_ours(settings, directory_of(held.uri))
        )
        await mark_removed(connection, gone)
    failpoint("retire.marked")
    await sweep(store, settings)
    await forget_arms(store, timedelta(hours=settings.windows.lookback_hours))
    for place in (settings.home.artifacts, settings.home.datasets):
        await asyncio.to_thread(remove_unfinished, place, UNFINISHED_S)
    return gone


def kept(
    holdings: Holdings, bases: Mapping[int, str], *, number: int, max_staleness: int
) -> frozenset[int]:
    """The policies whose checkpoints stay.

    Those that serve or are proposed; ``number`` champions to roll back to, as many of the newest,
    and as many of the best by the P&L of their verdict; base models; those of windows at work;
    behaviour policies that calls may still name (served in either arm, and not too stale); and the
    bases of kept adapters.

    Args:
        bases: version of an adapter → the directory of the model that it adapts.
    """
    present = [held for held in holdings.policies if not held.removed]
    parents = {held.policy_version: held.parent_version for held in holdings.policies}
    reigns = champions(holdings.routed)
    keep = {held.policy_version for held in present if held.kind == "base"}
    keep |= set(reigns[-1 - number :]) | holdings.in_use
    keep |= {held.policy_version for held in present[-number:]}
    judged = [(held.pnl, held.policy_version) for held in present if held.pnl is not None]
    keep |= {version for _, version in sorted(judged)[-number:]}
    if reigns:
        ages = staleness(parents, reigns[-1])
        served = holdings.challenged.union(holdings.routed)
        keep |= {v for v in served if ages.get(v, max_staleness + 1) <= max_staleness}
    needed = {bases[version] for version in keep if version in bases}
    return frozenset(keep | {held.policy_version for held in present if held.uri in needed})


def adapter_bases(policies: Iterable[Held]) -> dict[int, str]:
    """Version of each adapter that is there → what it says that it adapts. Blocking.

    Raises:
        ModelError: an adapter does not say it, so nothing can be known not to be its base.
    """
    bases = {}
    for held in policies:
        config = directory_of(held.uri) / "adapter_config.json"
        if held.removed or not config.exists():
            continue
        try:
            bases[held.policy_version] = json.loads(config.read_text())["base_model_name_or_path"]
        except (ValueError, KeyError) as error:
            raise ModelError(
                f"no checkpoint was removed: {config} of policy {held.policy_version} does not name"
                f" its base model ({error!r}): restore the file, or delete that directory"
            ) from error
    return bases


def directory_of(uri: str) -> Path:
    return Path(uri.removeprefix("file://"))


def is_ours(settings: Settings, directory: Path) -> bool:
    """Only what lies directly under this home's ``checkpoints`` is ever deleted."""
    return not directory.is_symlink() and directory.parent == settings.home.checkpoints


async def sweep(store: Store, settings: Settings) -> None:
    """Delete directories of removed policies and of claims that can commit no more.

    The order matters: directories are listed first, so the claim that made one is known; and
    windows are read before policies, so the policy of a window that is seen as trained is known.
    A checkpoint is also known by its name alone: its row may reach this home by another path.
    """
    found = await asyncio.to_thread(_listed, settings)
    windows = await worked_windows(store)
    removed = {directory_of(uri): gone for uri, gone in (await checkpoints(store)).items()}
    held = {path.name for path, gone in removed.items() if not gone}
    oldest = datetime.now(UTC) - timedelta(hours=settings.windows.lookback_hours)
    for path in found:
        if path in removed:
            over = removed[path]
        elif path.parent == settings.home.checkpoints and path.name in held:
            over = False
        elif maker := _maker(path):
            over = maker.is_over(windows, path.parent == settings.home.progress, oldest)
        else:  # nothing that we made
            over = False
        if over:
            await asyncio.to_thread(_delete, path)


@dataclass(frozen=True, slots=True)
class _Maker:
    """The claim that a directory is named after."""

    window_id: str
    epoch: int

    def is_over(
        self, windows: Mapping[str, WorkedWindow], in_progress: bool, oldest: datetime
    ) -> bool:
        """A checkpoint is committed under the epoch that began it, or never. Progress is taken up
        by the next claim, as long as windows of that age are trained at all."""
        window = windows.get(self.window_id)
        if window is None:  # of another database: not ours to judge
            return False
        if in_progress:
            return window.state not in _RESUMABLE or window.updated_at < oldest
        return self.epoch < window.epoch or window.state not in IN_WORK


def _maker(path: Path) -> _Maker | None:
    match = _CLAIM.fullmatch(path.name)
    if match is None:
        return None
    window_id = f"{match['hour']}:{match['minute']}{match['recipe'] or ''}"
    return _Maker(window_id, int(match["epoch"]))


def _listed(settings: Settings) -> list[Path]:
    return [
        path
        for place in (settings.home.checkpoints, settings.home.progress)
        if place.is_dir()
        for path in place.iterdir()
        if path.is_dir() and not path.is_symlink()
    ]


def _delete(directory: Path) -> None:
    try:
        failpoint("retire.deleting")
        shutil.rmtree(directory)
        failpoint("retire.deleted")
        log.debug("%s is deleted", directory)
    except FileNotFoundError:  # another window's sweep was quicker, and goes on
        return
    except OSError as error:
        log.error(
            "%s cannot be deleted (%s): delete it by hand, or mend that; the next window tries"
            " again",
            directory,
            error,
        )
