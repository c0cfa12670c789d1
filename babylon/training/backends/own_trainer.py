"""One GRPO update by the project's own trainer, in this process or in several."""

import asyncio

import torch

from babylon.training.backends.train_input import TrainInput
from babylon.training.grpo.ranks import ALONE, Ranks
from babylon.training.grpo.trainer import Progress
from babylon.training.preferences.objective import Preferences
from babylon.training.processes.job import UpdateJob
from babylon.training.processes.launch import run_in_processes
from babylon.training.update import update_checkpoint
from babylon.training.update_options import preference_config, trainer_config, tuning_options
from babylon.training.update_result import Update


async def update_torch(work: TrainInput) -> Update:
    """Run one GRPO update of the parent's checkpoint, in a thread or in ``TRAIN_PROCESSES``."""
    training = work.settings.training
    processes = training.processes or torch.cuda.device_count()
    job = UpdateJob(
        parent=str(work.parent.uri),
        rows=tuple(work.rows),
        target=work.target,
        tuning=training.tuning,
        config=trainer_config(training, work.settings.seed),
        transfer_layers=training.transfer_layers,
        options=tuning_options(training),
        staleness=dict(work.staleness),
        behaviours=dict(work.behaviours),
        optimizer=work.optimizer,
        progress_directory=work.progress_directory,
        home=work.settings.home,
        preferences=Preferences(
            objective=training.objective,
            options=preference_config(work.settings.preferences),
            replies=tuple(work.replies),
        ),
    )
    if processes > 1:
        return await asyncio.to_thread(run_in_processes, job, processes, work.progress)
    return await asyncio.to_thread(run_job, job, work.progress)


def run_job(job: UpdateJob, progress: Progress | None, ranks: Ranks = ALONE) -> Update:
    """Run ``update_checkpoint`` with a job's arguments."""
    return update_checkpoint(**job.arguments(), progress=progress, ranks=ranks)
