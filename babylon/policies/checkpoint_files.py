"""Digest, context and base model of a checkpoint, read from its files without loading it."""

import hashlib
import json
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


# Suffixes of weights, configuration and tokenizer. The optimiser's state is left out.
_DIGESTED = {".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"}
_ADAPTER = "adapter_config.json"


def local_path(uri: str) -> Path:
    """The path of a policy's ``uri``."""
    return Path(uri.removeprefix("file://"))


def checkpoint_digest(uri: str) -> str | None:
    """SHA-256 over names and contents of weights, configuration and tokenizer.

    None if there is no such directory, as for a model of the Hugging Face hub. Blocking, a second
    a GB.
    """
    directory = local_path(uri)
    if not directory.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.suffix in _DIGESTED and path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.relative_to(directory)}\n{content}\n".encode())
    return digest.hexdigest()


def adapter_base(uri: str) -> str | None:
    """The base model of an adapter, or None if the checkpoint is a full model.

    Raises:
        ModelError: the adapter's configuration cannot be read, or names no base model.
    """
    path = local_path(uri) / _ADAPTER
    if not path.exists():
        return None
    try:
        base = json.loads(path.read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} cannot be read: {error or type(error).__name__}") from error
    if not isinstance(base, str) or not base:
        raise ModelError(f"{path} names no base model: {base!r}")
    return base


def context_of(uri: str) -> int | None:
    """Maximum number of tokens of prompt and answer together. None for models of the hub.

    Raises:
        ModelError: an adapter's configuration cannot be read.
    """
    try:
        config = json.loads((local_path(adapter_base(uri) or uri) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    found = config.get("max_position_embeddings")
    return found if isinstance(found, int) else None
