"""Checkpoints for other machines: their files go into the object store, and come from there."""

import os
import shutil
from pathlib import Path

from babylon.core.errors import ModelError
from babylon.core.home import Home
from babylon.core.objects import fetch, publish
from babylon.policies.checkpoint_files import adapter_base, checkpoint_digest


def fetch_checkpoint(home: Home, uri: str) -> str:
    """Bring a checkpoint and the base model of an adapter here. Return ``uri``. Blocking.

    An id of the Hugging Face hub, and a directory outside the home, are left as they are.

    Raises:
        ArtifactError: The files are not in the store, or arrive damaged.
        ModelError: The adapter's configuration cannot be read.
    """
    if home.store and Path(uri).is_absolute():
        fetch(home, Path(uri))
        if base := adapter_base(uri):
            fetch(home, Path(base))
    return uri


def fetch_checkpoints(home: Home, *uris: str) -> None:
    """Bring several checkpoints here (``fetch_checkpoint``)."""
    for uri in uris:
        fetch_checkpoint(home, uri)


def name_of_base(home: Home, base: str | None) -> str | None:
    """Return BASE_MODEL. A directory inside the home keeps its name when the home moves."""
    if base is None or not Path(base).is_dir():
        return base
    reference = home.reference(os.path.abspath(base))
    return reference if reference.startswith("home:") else base


def publish_checkpoint(home: Home, uri: str) -> str | None:
    """Copy a checkpoint into the store, and return the digest of its files. Blocking.

    Raises:
        StorageError: The store does not take it.
    """
    path = Path(uri)
    if path.is_absolute() and path.is_relative_to(home.root):
        publish(home, path)
    return checkpoint_digest(uri)


def in_the_home(home: Home, base: str) -> str:
    """Return a base model that other machines can read: a directory outside is copied to the home.

    Raises:
        ModelError: The home has another model of that name.
    """
    source = Path(base)
    if not home.store or not source.is_dir() or source.absolute().is_relative_to(home.root):
        return base
    target = home.models / source.absolute().name
    if not target.exists():
        part = target.with_name(f".{target.name}-{os.getpid()}.tmp")
        shutil.rmtree(part, ignore_errors=True)  # of a killed process: in a container pids recur
        try:
            shutil.copytree(source, part)
            os.rename(part, target)
        except OSError:
            shutil.rmtree(part, ignore_errors=True)
            if not target.exists():  # else another process was faster
                raise
    if checkpoint_digest(str(target)) != checkpoint_digest(base):
        raise ModelError(f"BASE_MODEL={base!r}: {target} is another model: rename one of the two")
    return str(target)
