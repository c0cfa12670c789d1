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
PUBLIC_SUFFIXES = {".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"}
ADAPTER_CONFIG = "adapter_config.json"
_ROOMS = {"models", "checkpoints"}  # directories of a home
_ABOUT_THE_FILE = {"_name_or_path", "transformers_version"}


def checkpoint_digest(uri: str) -> str | None:
    """SHA-256 over names and contents of weights, configuration and tokenizer.

    None if there is no such directory, as for a model of the Hugging Face hub. Blocking, a second
    a GB.
    """
    directory = Path(uri)
    if not directory.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.suffix in PUBLIC_SUFFIXES and path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.relative_to(directory)}\n{content}\n".encode())
    return digest.hexdigest()


def shape_of(uri: str) -> str:
    """Digest of architecture, tokenizer and chat template: two full models of one shape differ only
    in the values of their weights. A model of the Hugging Face hub is a shape of its own.
    """
    directory = Path(uri)
    if not directory.is_dir():
        return uri
    config, tokenizer, settings = (
        json.loads(path.read_text()) if (path := directory / name).exists() else {}
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
    )
    template = directory / "chat_template.jinja"
    parts = [
        {name: value for name, value in config.items() if name not in _ABOUT_THE_FILE},
        tokenizer,
        template.read_text() if template.exists() else settings.get("chat_template"),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def adapts_experts(uri: str) -> bool:
    """True if a checkpoint is an adapter on the fused expert weights of a mixture, which PEFT calls
    parameters and not modules."""
    try:
        config = json.loads((Path(uri) / ADAPTER_CONFIG).read_text())
    except (OSError, ValueError):
        return False
    return bool(config.get("target_parameters"))


def adapter_base(uri: str) -> str | None:
    """The base model of an adapter, or None if the checkpoint is a full model.

    A relative path starts at the adapter's directory. An absolute path to a model or checkpoint of
    a home, as earlier versions wrote it, may lead to a home that was moved or copied: the directory
    of that name in the adapter's own home comes first.

    Raises:
        ModelError: the adapter's configuration cannot be read, or names no base model.
    """
    directory = Path(uri)
    path = directory / ADAPTER_CONFIG
    if not path.exists():
        return None
    try:
        base = json.loads(path.read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} cannot be read: {str(error) or type(error).__name__}") from error
    if not isinstance(base, str) or not base:
        raise ModelError(f"{path} names no base model: {base!r}")
    if base.startswith("."):
        return os.path.normpath(directory.absolute() / base)
    room, name = Path(base).parent.name, Path(base).name
    home = _home_of(directory)
    if home and Path(base).is_absolute() and room in _ROOMS and (home / room / name).is_dir():
        return str(home / room / name)
    return base


def _home_of(checkpoint: Path) -> Path | None:
    """Return the home that a checkpoint is in, if it is in one. ``/adapter`` is in none."""
    above = checkpoint.absolute().parents
    return above[1] if len(above) > 1 else None


def make_portable(directory: Path, target: Path) -> None:
    """Name an adapter's base model relative to the adapter, if both are in one home.

    ``directory`` holds the adapter, ``target`` is its place in the home's ``checkpoints``. The home
    can then be moved or copied, and the adapter's digest stays the same.
    """
    path = directory / ADAPTER_CONFIG
    if not path.exists():
        return
    config = json.loads(path.read_text())
    base = config["base_model_name_or_path"]
    home = _home_of(target)
    if home and Path(base).is_absolute() and Path(base).is_relative_to(home):
        config["base_model_name_or_path"] = os.path.relpath(base, target.absolute())
        path.write_text(json.dumps(config, indent=2, sort_keys=True))


def context_of(uri: str) -> int | None:
    """Maximum number of tokens of prompt and answer together. None for models of the hub.

    Raises:
        ModelError: an adapter's configuration cannot be read.
    """
    try:
        config = json.loads((Path(adapter_base(uri) or uri) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    found = config.get("max_position_embeddings")
    return found if isinstance(found, int) else None
