"""A policy's whole weights in one directory: an adapter merged into its base."""

import logging
import os
import shutil
import subprocess
from pathlib import Path

import torch
from transformers import AutoConfig

from babylon.core.errors import ModelError
from babylon.policies.checkpoint_files import adapter_base
from babylon.policies.load import load_policy

log = logging.getLogger(__name__)
CONVERT_S = 3600.0  # of the largest models, from a slow disk
_VARIABLES = ("PATH", "HOME", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH")  # no secret of ours
CONVERTER = "convert_hf_to_gguf.py"  # llama.cpp's; it is not on the package index


def write_whole(uri: str, base: str, directory: Path) -> None:
    """Write the merged weights and the tokenizer, in the precision of the line's ``base`` model.

    A full checkpoint holds the trainer's fp32 master weights, twice the base's bytes.

    Raises:
        ModelError: no policy loads from ``uri``, or the base has no configuration.
    """
    model, tokenizer = load_policy(uri, device="cpu")  # the GPU may be an engine's
    kind = _precision(adapter_base(uri) or adapter_base(base) or base)
    if kind is not None:
        torch.nn.Module.to(model, kind)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _precision(base: str) -> torch.dtype | None:
    try:
        kind: torch.dtype | None = AutoConfig.from_pretrained(base).dtype
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the base model {base} has no configuration that can be read, so the precision of the"
            f" weights is unknown: bring it back ({type(error).__name__})"
        ) from error
    return kind


def write_gguf(source: Path, target: Path) -> Path | None:
    """Write whole weights for llama.cpp. None without its converter, or if it cannot convert them.

    The converter needs llama.cpp's own checkout, so it is found on the ``PATH``.
    """
    converter = shutil.which(CONVERTER)
    if converter is None:
        return None
    try:
        done = subprocess.run(
            [converter, str(source), "--outfile", str(target)],
            capture_output=True,
            text=True,
            timeout=CONVERT_S,
            env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        )
    except subprocess.TimeoutExpired:
        log.warning("no gguf: %s took more than %.0f s", CONVERTER, CONVERT_S)
        return None
    if done.returncode == 0 and target.exists():
        return target
    lines = done.stderr.strip().splitlines()
    log.warning("no gguf: %s failed: %s", CONVERTER, lines[-1] if lines else "")
    return None
