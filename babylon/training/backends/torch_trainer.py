"""``TRAINER=torch``: our own trainer, in a thread of this process."""

import asyncio
from typing import TYPE_CHECKING

from babylon.training.backends.updater import TrainInput

if TYPE_CHECKING:
    from babylon.training.update import Update


async def update_torch(work: TrainInput) -> "Update":
    """One GRPO update of the parent's checkpoint."""
    from babylon.training.update import update_checkpoint

    return await asyncio.to_thread(
        update_checkpoint,
        work.parent.uri,
        work.rows,
        work.target,
        tuning=work.settings.training.tuning,
        config=work.config,
        transfer_layers=work.settings.training.transfer_layers,
        staleness=work.staleness,
        behaviours=work.behaviours,
        progress_directory=work.progress_directory,
        progress=work.progress,
    )
