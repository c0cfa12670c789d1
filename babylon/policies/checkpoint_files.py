"""What the files of a checkpoint say, without loading it: digest, context, an adapter's base."""

import hashlib
import json
from pathlib import Path

from babylon.core.errors import ModelError

# Weights, configuration and tokenizer decide what a policy says; the optimiser's state does not.
_DECIDES = {".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"}
_ADAPTER = "adapter_config.json"


def local_path(uri: str) -> Path:
    """Where a policy lies."""
    return Path(uri.removeprefix("file://"))


def checkpoint_digest(uri: str) -> str | None:
    """SHA-256 over names and contents of the files that decide what a policy says; ``None`` when
    there is no such directory, as for a model of the Hugging Face hub. Blocking, a second a GB.
    """
    directory = local_path(uri)
    if not directory.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.suffix in _DECIDES and path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.relative_to(directory)}\n{content}\n".encode())
    return digest.hexdigest()


def adapter_base(uri: str) -> str | None:
    """The model that an adapter belongs on; ``None`` when the checkpoint is a full model.

    Raises:
        ModelError: the adapter's configuration cannot be read, or names no base.
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
    """Tokens that prompt and answer may have together; of the hub's models nobody knows.

    Raises:
        ModelError: an adapter's configuration cannot be read.
    """
    try:
        config = json.loads((local_path(adapter_base(uri) or uri) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    found = config.get("max_position_embeddings")
    return found if isinstance(found, int) else None
