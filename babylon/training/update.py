"""One window's update on disk: parent checkpoint + scored calls → new checkpoint + report."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from babylon.core.errors import TrainingError, WindowNotReadyError
from babylon.core.home import Home
from babylon.core.memory import free_memory_is_kept
from babylon.core.trajectories import TrainingRow
from babylon.training.anchor import ANCHOR_FILE, in_force, load_anchor, moved
from babylon.training.call_tokens import scored_trajectories
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.forward import OutOfMemoryError
from babylon.training.grpo.ranks import ALONE, Ranks
from babylon.training.grpo.router_balance import RouterLossError
from babylon.training.grpo.trainer import Progress
from babylon.training.grpo.training_input import ScoredTrajectory
from babylon.training.grpo.training_window import NothingToTrainError
from babylon.training.learning_rate import reinforcement_rate
from babylon.training.preferences.objective import SCORES_ONLY, Preferences, learn
from babylon.training.processes.shard import load_share
from babylon.training.progress_file import ProgressFile, place_of, update_digest
from babylon.training.trainable import (
    DEFAULT_OPTIONS,
    SharedBase,
    Trainable,
    TransferLayers,
    Tuning,
    TuningOptions,
    save_checkpoint,
    whole_state,
)
from babylon.training.update_result import Excluded, Update, update_of


@free_memory_is_kept()
def update_checkpoint(
    parent: Path | str,
    rows: Sequence[TrainingRow],
    target: Path,
    *,
    tuning: Tuning,
    config: TrainerConfig,
    transfer_layers: TransferLayers = "all",
    options: TuningOptions = DEFAULT_OPTIONS,
    staleness: Mapping[int, int] | None = None,
    optimizer: str | None = None,
    progress_directory: Path | None = None,
    home: Home | None = None,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
    preferences: Preferences = SCORES_ONLY,
    base: SharedBase | None = None,
) -> Update:
    """Train the parent policy on a window and save the result. Blocking, minutes on a GPU.

    Args:
        staleness: policy version → updates since.
        optimizer: checkpoint whose optimiser goes on; the parent's by default.
        progress_directory: holds the progress of an interrupted update, which is then resumed. It
            stays until the caller, who commits the result, removes it.
        home: its object store gets the progress too, for a worker on another machine.
        ranks: the processes that share the update. The first one alone writes.
        preferences: the objective, and replies that were sampled for it.
        base: the frozen model below the adapter, if several updates share it.

    Raises:
        WindowNotReadyError: nothing in the window can be trained; nothing was written.
        TrainingError: it diverged, does not fit, or cannot have a setting; nothing was written.
        ModelError: the parent does not load.
    """
    trainable = load_share(parent, tuning, transfer_layers, options, optimizer, base, ranks)
    if config.target_kl is not None:
        config = replace(config, learning_rate=reinforcement_rate(trainable.model, tuning))
    trajectories, excluded = _scored(trainable, rows, preferences)
    anchor = load_anchor(trainable, parent) if config.kl_penalty else {}
    # saved progress is resumed only if every input of the update is the same
    decides = {
        "parent": place_of(parent),
        "tuning": tuning,
        "transfer_layers": transfer_layers,
        "options": options,
        "optimizer": optimizer and place_of(optimizer),
        "config": config,
        "staleness": sorted((staleness or {}).items()),
        "preferences": preferences,
    }
    where, digest = progress_directory, update_digest(rows, decides) if progress_directory else ""
    journal = ProgressFile(where, digest, trainable, home, ranks) if where else None
    with _own_errors(journal):
        learnt = learn(
            trainable,
            trajectories,
            config,
            preferences,
            context=_context(trainable),
            staleness=staleness or {},
            reference=in_force(trainable, anchor) if anchor else None,
            journal=journal,
            progress=progress,
            ranks=ranks,
        )
    first, rate = ranks.rank == 0, config.anchor_rate
    after = {ANCHOR_FILE: moved(anchor, trainable, rate, first=first)} if anchor else None
    state = whole_state(trainable, first=first)
    if first:
        save_checkpoint(trainable, target, after, state)
    return update_of(learnt, excluded)


@contextmanager
def _own_errors(journal: ProgressFile | None) -> Iterator[None]:
    """Turn the trainer's errors into ours. Progress that leads nowhere is removed."""
    try:
        yield
    except NothingToTrainError as error:
        _remove(journal)
        raise WindowNotReadyError(str(error)) from error
    except (FloatingPointError, RouterLossError) as error:
        _remove(journal)
        raise TrainingError(str(error)) from error
    except OutOfMemoryError as error:  # keep the progress: a larger machine can resume it
        raise TrainingError(str(error)) from error


def _scored(
    trainable: Trainable, rows: Sequence[TrainingRow], preferences: Preferences
) -> tuple[list[ScoredTrajectory], Excluded]:
    vocabulary, context = trainable.model.config.vocab_size, _context(trainable)
    words = {(one.trajectory_id, one.call): one.text for one in preferences.words}
    return scored_trajectories(trainable.tokenizer, rows, context, vocabulary, words)


def _context(trainable: Trainable) -> int:
    bound = getattr(trainable.model.config, "max_position_embeddings", None)
    return int(bound or sys.maxsize)  # some have no bound


def _remove(journal: ProgressFile | None) -> None:
    if journal is not None:
        journal.remove()
