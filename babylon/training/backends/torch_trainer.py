"""``TRAINER=torch``: our own trainer, in a thread of this process."""

import asyncio

from babylon.core.settings import TrainingSettings
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
        tuning=work.settings.training.tuning,
        config=trainer_config(work.settings.training, work.settings.seed),
        transfer_layers=work.settings.training.transfer_layers,
        staleness=work.staleness,
        behaviours=work.behaviours,
        progress_directory=work.progress_directory,
        progress=work.progress,
    )


def trainer_config(training: TrainingSettings, seed: int) -> TrainerConfig:
    """The trainer's configuration that the settings describe."""
    return TrainerConfig(
        iterations=training.iterations,
        trajectories_per_step=training.batch_size * training.accumulation,
        max_tokens=training.max_tokens,
        learning_rate=training.effective_learning_rate,
        warmup_steps=training.warmup_steps,
        loss=training.loss,
        advantage=training.advantage,
        call_weight=training.call_weight,
        kl_penalty=training.kl_penalty,
        max_staleness=training.max_staleness,
        max_missing_logprobs=training.max_missing_logprobs,
        seed=seed,
    )
