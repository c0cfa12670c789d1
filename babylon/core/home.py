"""Directories of a home."""

from pathlib import Path

from babylon.core.errors import StorageError


def make_directory(path: Path) -> None:
    """``path`` and what is missing above it.

    Raises:
        StorageError: it cannot be made. That this is the reason is known only here: "no such
            file" (below ``/proc``, for example) is a bug where a file is opened.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot make the directory {path} ({error.strerror}): free the disk, or set"
            " BABYLON_HOME to a directory of yours that can be written"
        ) from error
