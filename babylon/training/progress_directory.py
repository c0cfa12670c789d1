"""The directory that holds an update's progress, and its handover from claim to claim.

Every claim has a directory of its own, so that a fenced worker which still runs cannot write into
its successor's. The successor takes over the progress by renaming the earlier claim's file. Files
are replaced and never written in place, so the fenced worker cannot change the file afterwards.
With an object store, the successor may be on another machine, and takes the stored progress.

The progress outlives the update until its result is committed: until then, the next claim may have
to finish it. Retention removes what belongs to a window that no claim will resume.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from babylon.core.errors import ArtifactError, BabylonError
from babylon.core.failpoints import failpoint
from babylon.core.home import Home
from babylon.core.objects import fetch, names, remove
from babylon.core.types import Claim

log = logging.getLogger(__name__)
PROGRESS_FILE = "progress.pt"


def claim_name(claim: Claim) -> str:
    """``2025-11-14T0900-e2``: the name of files and directories that belong to one claim."""
    return f"{_window_name(claim.window_id)}-e{claim.epoch}"


def progress_directory(home: Home, claim: Claim, part: str = "") -> Path:
    return home.progress / f"{claim_name(claim)}{part}"


def take_up_progress(home: Home, claim: Claim, part: str = "") -> Path:
    """Return the claim's directory, after moving the newest earlier claim's progress into it.

    ``part``: a suffix, for one of several updates of the window.
    """
    own = progress_directory(home, claim, part)
    stored = names(home, home.progress)
    if own in stored:
        _fetch(home, own)
    own.mkdir(parents=True, exist_ok=True)
    if (own / PROGRESS_FILE).exists():  # saved by this claim
        return own
    for earlier in _earlier(stored, claim, part):
        _fetch(home, earlier)
        try:
            failpoint("progress.take_up")
            os.rename(earlier / PROGRESS_FILE, own / PROGRESS_FILE)
            failpoint("progress.taken_up")
        except FileNotFoundError:  # killed before its first save
            continue
        break
    return own


def forget_progress(home: Home | None, directory: Path) -> None:
    """Delete an update's progress: its result is committed, or it leads nowhere."""
    failpoint("progress.forget")
    if home is not None:
        with suppress(BabylonError, OSError):  # retention tries again
            remove(home, directory)
    shutil.rmtree(directory, ignore_errors=True)
    failpoint("progress.forgotten")


def _fetch(home: Home, directory: Path) -> None:
    try:
        fetch(home, directory)
    except ArtifactError as error:  # a worker that was killed while it copied left only a part
        log.warning("stored progress is not used: %s", error)


def _earlier(directories: Iterable[Path], claim: Claim, part: str) -> list[Path]:
    pattern = re.compile(rf"{re.escape(_window_name(claim.window_id))}-e(\d+){re.escape(part)}")
    epochs = {
        path: int(match[1])
        for path in directories
        if (match := pattern.fullmatch(path.name)) and int(match[1]) < claim.epoch
    }
    return sorted(epochs, key=epochs.__getitem__, reverse=True)


def _window_name(window_id: str) -> str:
    return window_id.replace(":", "")
