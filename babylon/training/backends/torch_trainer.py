"""``TRAINER=torch``: our own trainer, in a thread of this process."""

import asyncio

from babylon.core.settings import Settings
from babylon.training.backends.train_input import TrainInput
from babylon.training.grpo.config import TrainerConfig
from babylon.training.update import update_checkpoint
from babylon.training.update_result import Update


async def update_torch(work: TrainInput) -> Update:
    """Run one GRPO update of the parent's checkpoint."""
    return await asyncio.to_thread(
        update_checkpoint,
        work.parent.uri,
        work.rows,
        work.target,
        tuning=work.settings.tuning,
        config=trainer_config(work.settings),
        transfer_layers=work.settings.transfer_layers,
        staleness=work.staleness,
        behaviours=work.behaviours,
        progress_directory=work.progress_directory,
        progress=work.progress,
    )


def trainer_config(settings: Settings) -> TrainerConfig:
    """The trainer's configuration that the settings describe."""
    return TrainerConfig(
        iterations=settings.iterations,
        trajectories_per_step=settings.batch_size * settings.accumulation,
        max_tokens=settings.max_tokens,
        learning_rate=settings.effective_learning_rate,
        warmup_steps=settings.warmup_steps,
        loss=settings.loss,
        advantage=settings.advantage,
        call_weight=settings.call_weight,
        kl_penalty=settings.kl_penalty,
        max_staleness=settings.max_staleness,
        max_missing_logprobs=settings.max_missing_logprobs,
        seed=settings.seed,
    )
