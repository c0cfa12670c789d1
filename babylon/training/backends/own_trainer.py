"""One GRPO update by the project's own trainer, in this process or in several."""

import asyncio
from dataclasses import replace

import torch

from babylon.core.learning_settings import TrainingSettings, reading_precision
from babylon.training.backends.train_input import TrainInput
from babylon.training.grpo.ranks import ALONE, Ranks
from babylon.training.grpo.trainer import Progress
from babylon.training.preferences.objective import Preferences
from babylon.training.processes.job import UpdateJob
from babylon.training.processes.launch import run_in_processes
from babylon.training.processes.nodes import Nodes
from babylon.training.recall import best_so_far, remembered
from babylon.training.trainable import SharedBase
from babylon.training.update import update_checkpoint
from babylon.training.update_options import preference_config, trainer_config, tuning_options
from babylon.training.update_result import Update


async def update_torch(work: TrainInput) -> Update:
    """Run one update of the parent's checkpoint, in a thread or in ``TRAIN_PROCESSES``."""
    return await asyncio.to_thread(run_work, work)


def run_work(work: TrainInput, base: SharedBase | None = None) -> Update:
    """Run an update, on ``base`` if it is given and one process is enough. Blocking."""
    training = work.settings.training
    if training.recall_chats is None:
        return _run(work, base)
    how = training.max_tokens, reading_precision(training.tuning, training.base_precision)
    before = best_so_far(str(work.parent.uri), training.recall_chats, *how)
    update = _run(work, base)
    return replace(update, recall=remembered(before, work.target, training.recall_chats, *how))


def _run(work: TrainInput, base: SharedBase | None) -> Update:
    training = work.settings.training
    if is_shared(training):
        nodes, processes = Nodes(training.nodes, training.rendezvous or ""), _processes(training)
        return run_in_processes(job_of(work), max(1, processes), work.progress, nodes)
    return run_job(job_of(work), work.progress, base=base)


def is_shared(training: TrainingSettings) -> bool:
    """True if several processes share an update: each loads its own weights, and this one none."""
    return _processes(training) > 1 or training.nodes > 1


def _processes(training: TrainingSettings) -> int:
    return training.processes or torch.cuda.device_count()


def job_of(work: TrainInput) -> UpdateJob:
    """The arguments of an update."""
    training = work.settings.training
    return UpdateJob(
        parent=str(work.parent.uri),
        rows=tuple(work.rows),
        target=work.target,
        tuning=training.tuning,
        config=trainer_config(training, work.settings.seed, work.settings.preferences),
        transfer_layers=training.transfer_layers,
        options=tuning_options(training, resize=work.resize),
        staleness=dict(work.staleness),
        optimizer=work.optimizer,
        progress_directory=work.progress_directory,
        home=work.settings.home,
        preferences=Preferences(
            objective=training.objective,
            options=preference_config(work.settings.preferences),
            replies=tuple(work.replies),
            words=tuple(work.words),
        ),
    )


def run_job(
    job: UpdateJob,
    progress: Progress | None,
    ranks: Ranks = ALONE,
    base: SharedBase | None = None,
) -> Update:
    """Run ``update_checkpoint`` with a job's arguments."""
    return update_checkpoint(**job.arguments(), progress=progress, ranks=ranks, base=base)
