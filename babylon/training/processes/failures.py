"""Errors of an update's ranks, as files beside its job.

This module does not import torch: the launcher of the ranks needs no model.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from babylon.core.errors import (
    BabylonError,
    ModelError,
    TrainingError,
    WindowNotReadyError,
    reason_of,
)

OWNER = "BABYLON_TRAINER_OWNER"  # variable with the pid of the process that waits for the update
_FILES = "failure-*.json"
_KNOWN = {kind.__name__: kind for kind in (ModelError, TrainingError, WindowNotReadyError)}


class RankFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The error of one rank. ``kind`` is the name of one of our errors, or empty."""

    rank: int
    kind: str
    message: str
    at: float  # seconds since 1970


def write_failure(directory: Path, rank: int, error: BaseException, at: float) -> None:
    """Store the error of one rank, without the values that a library quotes."""
    kind = next((name for name in _KNOWN if isinstance(error, _KNOWN[name])), "")
    failure = RankFailure(rank=rank, kind=kind, message=reason_of(error), at=at)
    part = directory / f".failure-{rank}"
    part.write_bytes(msgspec.json.encode(failure))
    part.replace(directory / _FILES.replace("*", str(rank)))


def first_failure(directory: Path) -> BabylonError | None:
    """The error that the others followed from, None without any.

    An error of ours explains more than a connection that was lost because its peer ended.
    """
    files = directory.glob(_FILES)
    found = [msgspec.json.decode(path.read_bytes(), type=RankFailure) for path in files]
    if not found:
        return None
    first = min(found, key=lambda failure: (not failure.kind, failure.at))
    kind: Callable[[str], BabylonError] = _KNOWN.get(first.kind, TrainingError)
    return kind(first.message if first.kind else f"rank {first.rank}: {first.message}")
