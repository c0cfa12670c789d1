"""Removal of play that is no longer in use: rows, calls, artifacts and reports of old windows."""

import asyncio
import logging
import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from babylon.core.home import Home
from babylon.core.objects import changed_at, names, remove
from babylon.core.settings import WindowSettings
from babylon.core.windows import AT_REST, parse_window_id
from babylon.stages.in_use import oldest_in_use, spent
from babylon.store.backup_lock import retention_lock
from babylon.store.call_partitions import remove_calls
from babylon.store.connection import Store, read_now
from babylon.store.play_in_use import (
    WindowUse,
    held_as,
    imported_later,
    published_since,
    remove_observations,
    remove_play,
    running_experiment_began,
    window_uses,
)
from babylon.store.plays import remove_plays
from babylon.store.published import published_window_ids

log = logging.getLogger(__name__)
UNFINISHED_S = 3600.0  # a younger file may belong to a run that has not committed it yet
_NAMED = re.compile(
    r"(?P<hour>\d{4}-\d\d-\d\dT\d\d)-?(?P<minute>\d\d)(?P<recipe>\+[a-z0-9-]+?)?"
    r"-((collected|validated|held-out|thinned|scored|train|validation|test)-[0-9a-f]{8}\.parquet|e\d+)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredPlay:
    """Numbers of windows, calls and files that were removed."""

    windows: int = 0
    calls: int = 0
    files: int = 0


async def retire_play(
    store: Store,
    home: Home,
    windows: WindowSettings,
    *,
    repository: str | None = None,
    now: datetime | None = None,
) -> RetiredPlay:
    """Remove the play that is older than ``RETENTION_DAYS`` and not in use; 0 keeps all of it.

    ``repository``: that of ``PUBLISH_TO``, if this host has it.

    Each window is one transaction, and files go after the rows that name them, so an interrupted
    run leaves nothing inconsistent and the next one goes on.
    """
    if not windows.retention_days:
        return RetiredPlay()
    before = oldest_in_use(
        now or await read_now(store),  # a worker's wrong clock must remove nothing
        days=windows.retention_days,
        lookback_hours=windows.lookback_hours,
        experiment_began=await running_experiment_began(store),
    )
    async with retention_lock(store) as other:
        if other:
            log.info("%s runs: this one removes no play", other)
            return RetiredPlay()
        published = await published_windows(store, repository, before)
        uses = await window_uses(store)
        old = spent(uses, before=before, published=published)
        if waiting := len(spent(uses, before=before, published=None)) - len(old):
            log.warning(
                "%d windows are older than %s and kept until they are published: see why"
                " `babylon dataset publish` fails, or unset PUBLISH_TO",
                waiting,
                f"{before:%F}",
            )
        going, gone = (
            [
                parse_window_id(one.window_id, one.minutes)
                for one in uses
                if one.window_id in old and one.retired is retired
            ]
            for retired in (False, True)
        )
        going += await imported_later(store, gone, before)
        # One window after the other, because many deletes at once would slow the gateways' inserts.
        removed = [await remove_play(store, window, before) for window in going]
        # Anew, because that may take hours: calls of a window that was claimed meanwhile stay.
        uses = await window_uses(store)
        old = spent(uses, before=before, published=published)
        kept = [
            parse_window_id(one.window_id, one.minutes)
            for one in uses
            if not (one.retired and one.window_id in old)
        ]
        kept = [one for one in kept if one.start < before]
        calls = await remove_calls(store, before, kept)
        await remove_plays(store, before, kept)
        await remove_observations(store, before, kept)
        files = await _remove_files(store, home, await window_uses(store))
    retired = RetiredPlay(windows=sum(removed), calls=calls, files=files)
    if retired != RetiredPlay():
        log.info("removed what is older than %s and not in use: %s", f"{before:%F}", retired)
    return retired


async def published_windows(
    store: Store, repository: str | None, before: datetime
) -> frozenset[str] | None:
    """Return the windows whose play is in a repository; None if nobody publishes.

    Somebody does if this host has a repository, or if any host published since ``before``: a block
    or another host's environment may name it. The ledger decides, because files of this home may be
    lost with its disk.
    """
    if not repository and not await published_since(store, before):
        return None
    return await published_window_ids(store)


async def _remove_files(store: Store, home: Home, uses: Iterable[WindowUse]) -> int:
    """Delete the artifacts of finished windows, except the last scoring, and old reports.

    While the files of a window go, no worker can claim it: on another host, a new run of it finds
    the same file in the object store, and takes it for its own.
    """
    windows = {one.window_id: one for one in uses}
    named = {home.resolve(uri) for one in windows.values() for uri in one.artifacts}
    removed = 0
    for window_id, paths in (await asyncio.to_thread(_old_files, home)).items():
        window = windows.get(window_id)
        # a window of another database that shares the home is left alone
        if window is None or window.state not in AT_REST:
            continue
        if unnamed := [path for path in paths if str(path) not in named]:
            async with held_as(store, window) as held:
                if held:
                    await asyncio.to_thread(_remove_all, home, unnamed)
                    removed += len(unnamed)
    retired = {one.window_id for one in windows.values() if one.retired}
    return removed + await asyncio.to_thread(_remove_reports, home, retired)


def _remove_all(home: Home, paths: Iterable[Path]) -> None:
    for path in paths:
        remove(home, path)


def _remove_reports(home: Home, retired: Collection[str]) -> int:
    old = [path for path in names(home, home.arena) if _window_of(path.name) in retired]
    for path in old:
        with suppress(FileNotFoundError):
            remove(home, path)
    return len(old)


def _old_files(home: Home) -> dict[str, list[Path]]:
    """Return window id → its artifacts that no run can still be about to commit."""
    limit = time.time() - UNFINISHED_S
    found: defaultdict[str, list[Path]] = defaultdict(list)
    for path in names(home, home.artifacts):
        with suppress(FileNotFoundError):
            if path.suffix == ".parquet" and changed_at(home, path) < limit:
                found[_window_of(path.name) or ""].append(path)
    return found


def _window_of(name: str) -> str | None:
    """The window that a file or directory is named after."""
    match = _NAMED.fullmatch(name)
    return match and f"{match['hour']}:{match['minute']}{match['recipe'] or ''}"
