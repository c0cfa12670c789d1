"""Writing to disk so that a power cut leaves the whole or nothing."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """A file or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
