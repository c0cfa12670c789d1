"""``TRAINER=art-local``: a window through a backend of ART whose checkpoints lie on this disk."""

import asyncio
import shutil
import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from babylon.core.errors import TrainingError, WindowNotReadyError
from babylon.policies.adopt import adapter_base, adopt_adapter
from babylon.training.backends.art_metrics import from_art
from babylon.training.backends.art_window import art_window, limits_of
from babylon.training.backends.trainer_requirements import require_art_local
from babylon.training.backends.updater import TrainInput

if TYPE_CHECKING:
    from babylon.training.update import Update


async def update_art_local(work: TrainInput) -> "Update":
    """One window on this machine's GPU, with ART's own trainer."""
    require_art_local(work.settings)
    art = await load_art()
    root = work.settings.home.root / "art"
    return await update_on_disk(work, art.local_backend(root), root, scale_rewards=False)


async def update_on_disk(work: TrainInput, backend: Any, root: Path, **options: Any) -> "Update":
    """Train the parent with a backend that keeps its checkpoints where ART's ``LocalBackend`` does.

    The model is this claim's alone: its step 0 is the parent's adapter, its step 1 the result.

    Raises:
        WindowNotReadyError: nothing in the window can be trained.
        TrainingError: the backend failed; ``work.target`` was not written.
    """
    from babylon.training.update import Update

    limits = limits_of(work, context=None, secrets=None)
    window = await asyncio.to_thread(art_window, work.rows, limits)
    art = await load_art()
    base = await asyncio.to_thread(adapter_base, work.parent.uri)
    model = art.Model(name=work.target.name, project=work.settings.model.name, base_model=base)
    directory = root / model.project / "models" / model.name
    await asyncio.to_thread(_lay_out, directory, work.parent.uri, base)
    try:
        groups = await asyncio.to_thread(art.trajectory_groups, window.rows)
        with redirect_stdout(sys.stderr):  # ART prints, and stdout is for results
            await model.register(backend)
            rate = work.settings.training.effective_learning_rate
            result = await backend.train(model, groups, learning_rate=rate, **options)
        if not result.step:
            raise WindowNotReadyError(f"{type(backend).__name__} found nothing to train")
        checkpoint = directory / "checkpoints" / f"{result.step:04d}"
        await asyncio.to_thread(adopt_adapter, checkpoint, base, work.target)
    except RuntimeError as error:  # CUDA's, and that of a trainer process which died
        raise TrainingError(f"{type(backend).__name__} failed: {error}") from error
    finally:
        await backend.close()
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
    return Update(
        report=from_art(result.metrics, window.counts()),
        excluded=window.excluded,
        trajectory_ids=window.trajectory_ids,
    )


async def load_art() -> ModuleType:
    """``babylon.art.client``, imported in a thread: that takes 8 s, and a lease wants to be
    renewed."""
    return await asyncio.to_thread(import_module, "babylon.art.client")


def _lay_out(directory: Path, parent: str, base: str) -> None:
    """Step 0 of a model is its parent's adapter; what a claim before left there goes away."""
    shutil.rmtree(directory, ignore_errors=True)
    if parent != base:
        shutil.copytree(parent, directory / "checkpoints" / "0000")
