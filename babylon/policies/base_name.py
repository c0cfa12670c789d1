"""``BASE_MODEL``: a directory or a model id of the Hugging Face hub."""

import os.path
from pathlib import Path

from babylon.core.errors import ModelError


def local_directory(name: str) -> Path | None:
    """The directory of this name, or None for an id of the Hugging Face hub.

    Raises:
        ModelError: the name has the form of a path, and there is no such directory.
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
