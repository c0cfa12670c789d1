"""``TRAINER=art-local``: a window trained by an ART backend that keeps checkpoints on this disk."""

import asyncio
import json
import os
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import AutoTokenizer

from babylon.core.errors import TrainingError, WindowNotReadyError, reason_of
from babylon.core.home import sync
from babylon.policies.checkpoint_files import adapter_base, make_portable
from babylon.training.backends.art_window import art_limits, art_window
from babylon.training.backends.train_input import TrainInput
from babylon.training.backends.trainer_requirements import require_art_local
from babylon.training.update_result import Update, from_art


async def update_art_local(work: TrainInput) -> Update:
    """Train one window on this machine's GPU, with ART's own trainer."""
    require_art_local(work.settings.training)
    art = await load_art()
    root = work.settings.home.root / "art"
    return await update_on_disk(work, art.local_backend(root), root, scale_rewards=False)


async def update_on_disk(work: TrainInput, backend: Any, root: Path, **options: Any) -> Update:
    """Train the parent with a backend that stores checkpoints as ART's ``LocalBackend`` does.

    Every claim has an ART model of its own: step 0 is the parent's adapter, step 1 the result.

    Args:
        backend: an ``art.Backend``.
        root: the directory below which the backend stores its models.
        options: further arguments of the backend's ``train``.

    Raises:
        WindowNotReadyError: nothing in the window can be trained.
        TrainingError: the backend failed; ``work.target`` was not written.
    """
    limits = art_limits(work, context=None, secrets=None)
    window = await asyncio.to_thread(art_window, work.rows, limits)
    art = await load_art()
    base = await asyncio.to_thread(adapter_base, work.parent.uri) or work.parent.uri
    model = art.Model(name=work.target.name, project=work.settings.model.name, base_model=base)
    directory = root / model.project / "models" / model.name
    await asyncio.to_thread(_write_step_0, directory, work.parent.uri, base)
    try:
        groups = await asyncio.to_thread(art.trajectory_groups, window.rows)
        with redirect_stdout(sys.stderr):  # ART prints, and stdout carries results only
            await model.register(backend)
            rate = work.settings.training.effective_learning_rate
            result = await backend.train(model, groups, learning_rate=rate, **options)
        if not result.step:
            raise WindowNotReadyError(f"{type(backend).__name__} found nothing to train")
        checkpoint = directory / "checkpoints" / f"{result.step:04d}"
        await asyncio.to_thread(adopt_adapter, checkpoint, base, work.target)
    except RuntimeError as error:  # from CUDA, or from a trainer process that died
        raise TrainingError(f"{type(backend).__name__} failed: {reason_of(error)}") from error
    finally:
        await backend.close()
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
    return Update(
        report=from_art(result.metrics, window.counts),
        excluded=window.excluded,
        trajectory_ids=window.trajectory_ids,
    )


async def load_art() -> ModuleType:
    """The module ``art_client``, imported in a thread.

    The import takes 8 s. In the event loop it would delay the renewal of the claim's lease.
    """

    def imported() -> ModuleType:
        from babylon.training.backends import art_client

        return art_client

    return await asyncio.to_thread(imported)


def _write_step_0(directory: Path, parent: str, base: str) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    if parent != base:
        shutil.copytree(parent, directory / "checkpoints" / "0000")


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
    make_portable(temporary, target)
    AutoTokenizer.from_pretrained(base).save_pretrained(temporary)
    for path in (*temporary.iterdir(), temporary):
        sync(path)
    shutil.rmtree(target, ignore_errors=True)  # left by a claim that crashed before its commit
    os.rename(temporary, target)
    sync(target.parent)
    return target
