"""Conversion of LoRA adapters from other trainers into checkpoints of ours."""

import json
import os
import shutil
from pathlib import Path

from transformers import AutoTokenizer

from babylon.core.errors import TrainingError
from babylon.policies.durable import sync

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adopt_adapter(source: Path, base: str, target: Path) -> Path:
    """Copy an adapter to ``target``, with our base model's path and tokenizer.

    The adapter's configuration names the trainer's own copy of the base model, and the tokenizer
    can be missing. The directory appears complete or not at all.

    Raises:
        TrainingError: ``source`` holds no LoRA adapter; nothing was written.
    """
    if missing := [name for name in (_CONFIG, _WEIGHTS) if not (source / name).is_file()]:
        found = ", ".join(sorted(path.name for path in source.iterdir())) or "nothing"
        raise TrainingError(f"the trained checkpoint has no {missing[0]}, only {found}")
    config = json.loads((source / _CONFIG).read_text())
    if config.get("peft_type") != "LORA":
        raise TrainingError(f"the trained checkpoint is {config.get('peft_type')!r}, not LORA")
    temporary = target.with_name(f".{target.name}-adopted")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    shutil.copyfile(source / _WEIGHTS, temporary / _WEIGHTS)
    (temporary / _CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": base}))
    AutoTokenizer.from_pretrained(base).save_pretrained(temporary)
    for path in (*temporary.iterdir(), temporary):
        sync(path)
    shutil.rmtree(target, ignore_errors=True)  # left by a claim that crashed before its commit
    os.rename(temporary, target)
    sync(target.parent)
    return target
