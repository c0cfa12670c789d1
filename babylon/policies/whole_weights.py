"""A policy's whole weights in one directory: an adapter merged into its base."""

import logging
import shutil
import subprocess
from pathlib import Path

import torch
from transformers import AutoConfig

from babylon.policies.checkpoint_files import adapter_base
from babylon.policies.load import load_policy

log = logging.getLogger(__name__)
CONVERTER = "convert_hf_to_gguf.py"  # llama.cpp's; it is not on the package index


def write_whole(uri: str, directory: Path) -> None:
    """Write the merged weights and the tokenizer, in the base model's own precision.

    Raises:
        ModelError: no policy loads from ``uri``.
    """
    model, tokenizer = load_policy(uri, device="cpu")  # the GPU may be an engine's
    # The base may be a model of the hub, whose configuration was loaded with it.
    kind = AutoConfig.from_pretrained(adapter_base(uri) or uri).dtype
    if kind is not None:
        torch.nn.Module.to(model, kind)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write_gguf(source: Path, target: Path) -> Path | None:
    """Write whole weights for llama.cpp. None without its converter, or if it cannot convert them.

    The converter needs llama.cpp's own checkout, so it is found on the ``PATH``.
    """
    converter = shutil.which(CONVERTER)
    if converter is None:
        return None
    done = subprocess.run(
        [converter, str(source), "--outfile", str(target)], capture_output=True, text=True
    )
    if done.returncode == 0 and target.exists():
        return target
    lines = done.stderr.strip().splitlines()
    log.warning("no gguf: %s failed: %s", CONVERTER, lines[-1] if lines else "")
    return None
