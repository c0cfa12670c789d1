"""A checkpoint as vLLM serves it: an adapter on a base model, or a full model."""

import os.path
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from babylon.core.errors import ModelError


class _AdapterConfig(Struct, frozen=True):
    base_model_name_or_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPolicy:
    """A checkpoint under its immutable name. ``base``: the model of the server for it."""

    name: str
    version: int
    path: str
    base: str
    is_adapter: bool


def read_policy(name: str, path: str, version: int) -> VllmPolicy:
    """Read a checkpoint's configuration.

    Raises:
        ModelError: there is no checkpoint at ``path``.
    """
    base = _base_of(path)
    is_adapter = base is not None
    return VllmPolicy(
        name=name,
        version=version,
        path=path,
        base=canonical(base if base is not None else path),
        is_adapter=is_adapter,
    )


def canonical(model: str) -> str:
    """Return a directory's real path; a Hugging Face model id stays as it is."""
    return os.path.realpath(model) if os.path.isdir(model) else model


def _base_of(path: str) -> str | None:
    """Return the base model of an adapter, ``None`` for a full model."""
    directory = Path(path)
    if not directory.is_dir():
        if directory.is_absolute():
            raise ModelError(f"no policy loads from {path}: there is no such directory")
        return None  # a Hugging Face model id
    config = directory / "adapter_config.json"
    if config.exists():
        try:
            adapter = msgspec.json.decode(config.read_bytes(), type=_AdapterConfig)
        except msgspec.DecodeError as error:
            raise ModelError(f"no policy loads from {path}: {config.name}: {error}") from error
        return adapter.base_model_name_or_path
    if not (directory / "config.json").exists():
        raise ModelError(
            f"no policy loads from {path}: it has neither config.json nor adapter_config.json"
        )
    return None
