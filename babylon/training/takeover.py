"""Where an update keeps its progress, and how the next claim of the window takes it up.

Every claim has a directory of its own: a worker that was fenced, but computes on, cannot write
into its successor's. What it left is taken over by renaming the one complete file: that file is
never written to again, only replaced, so whatever the other worker does next, it does elsewhere.
"""

import os
import re
from pathlib import Path

from babylon.core.failpoints import failpoint
from babylon.core.settings import Settings
from babylon.core.types import Claim

FILE = "progress.pt"  # as ``babylon.training.update_progress`` names it


def claim_name(claim: Claim) -> str:
    """``2025-11-14T0900-e2``: of whatever belongs to one claim."""
    return f"{_window_name(claim.window_id)}-e{claim.epoch}"


def progress_directory(settings: Settings, claim: Claim) -> Path:
    return settings.home.progress / claim_name(claim)


def take_up_progress(settings: Settings, claim: Claim) -> Path:
    """The claim's own directory, with the progress of the newest claim before that left any."""
    own = progress_directory(settings, claim)
    own.mkdir(parents=True, exist_ok=True)
    if (own / FILE).exists():  # this very claim was here before
        return own
    for earlier in _earlier(settings, claim):
        try:
            failpoint("progress.take_up")
            os.rename(earlier / FILE, own / FILE)
            failpoint("progress.taken_up")
        except FileNotFoundError:  # killed before its first save
            continue
        break
    return own


def _earlier(settings: Settings, claim: Claim) -> list[Path]:
    """Directories of the window's earlier claims, newest first."""
    pattern = re.compile(rf"{re.escape(_window_name(claim.window_id))}-e(\d+)")
    epochs = {
        path: int(match[1])
        for path in settings.home.progress.iterdir()
        if (match := pattern.fullmatch(path.name)) and int(match[1]) < claim.epoch
    }
    return sorted(epochs, key=epochs.__getitem__, reverse=True)


def _window_name(window_id: str) -> str:
    return window_id.replace(":", "")
