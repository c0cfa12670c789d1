"""What ``BASE_MODEL`` names, told apart without loading anything."""

import os.path
from pathlib import Path

from babylon.core.errors import ModelError


def local_directory(name: str) -> Path | None:
    """The directory of that name, or ``None`` for an id of the Hugging Face hub.

    Raises:
        ModelError: it can only be a path, and no directory is there.
    """
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelError(
            f"BASE_MODEL={name!r}: no such directory: {path.absolute()}: name a directory that"
            " save_pretrained wrote, or a Hugging Face model id (owner/name)"
        )
    return None
