"""A policy's whole weights in one directory: an adapter merged into its base."""

import json
from pathlib import Path

import torch

from babylon.policies.checkpoint_files import adapter_base
from babylon.policies.load import load_policy


def write_whole(uri: str, directory: Path) -> None:
    """Write the merged weights and the tokenizer, in the base model's own precision.

    Raises:
        ModelError: no policy loads from ``uri``.
    """
    model, tokenizer = load_policy(uri)
    kind = _precision(adapter_base(uri) or uri)
    if kind is not None:
        torch.nn.Module.to(model, kind)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _precision(base: str) -> torch.dtype | None:
    """Return the type of the base model's weights, None if its configuration names none."""
    try:
        config = json.loads((Path(base) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    found = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return found if isinstance(found, torch.dtype) else None
