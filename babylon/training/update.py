"""One window's update on disk: parent checkpoint + scored calls → new checkpoint + report."""

import gc
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from babylon.core.errors import TrainingError, WindowNotReadyError
from babylon.core.text import redact
from babylon.core.trajectories import TrainingRow
from babylon.policies.layers import TransferLayers
from babylon.policies.load import load_policy
from babylon.training.call_tokens import scored_trajectories
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.memory import FittingForward, OutOfMemoryError
from babylon.training.grpo.sharing import Decode
from babylon.training.grpo.trainer import Progress, train_on_window
from babylon.training.grpo.training_window import (
    NothingToTrainError,
    TrainingWindow,
    compile_window,
)
from babylon.training.progress_file import ProgressFile, update_digest
from babylon.training.trainable import Trainable, Tuning, load_trainable, save_checkpoint
from babylon.training.update_result import Update


def update_checkpoint(
    parent: Path | str,
    rows: Sequence[TrainingRow],
    target: Path,
    *,
    tuning: Tuning,
    config: TrainerConfig,
    transfer_layers: TransferLayers = "all",
    staleness: Mapping[int, int] | None = None,
    behaviours: Mapping[int, str] | None = None,
    progress_directory: Path | None = None,
    progress: Progress | None = None,
) -> Update:
    """Train the parent policy on a window and save the result. Blocking, minutes on a GPU.

    Args:
        staleness: policy version → number of updates between it and the parent.
        behaviours: policy version → checkpoint, for calls whose logprobs were not logged.
        progress_directory: holds the progress of an interrupted update, which is then resumed.

    Raises:
        WindowNotReadyError: nothing in the window can be trained; nothing was written.
        TrainingError: the update diverged, or does not fit into memory; nothing was written.
        ModelError: the parent or a behaviour policy does not load.
    """
    trainable = load_trainable(parent, tuning, config.learning_rate, transfer_layers)
    trajectories, excluded = scored_trajectories(trainable.tokenizer, rows, _context(trainable))
    reference = trainable.reference() if config.kl_penalty else None
    journal = None
    if progress_directory is not None:
        # saved progress is resumed only if every input of the update is the same
        decides = {
            "parent": str(parent),
            "tuning": tuning,
            "transfer_layers": transfer_layers,
            "config": config,
            "staleness": sorted((staleness or {}).items()),
            "behaviours": sorted((behaviours or {}).items()),
        }
        digest = update_digest(rows, decides)
        journal = ProgressFile(progress_directory, digest, trainable)
    try:
        window = compile_window(
            trajectories, config, staleness=staleness, decode=_redacted_text(trainable.tokenizer)
        )
        window = with_behaviours(window, behaviours or {})
        report = train_on_window(
            trainable.model,
            trainable.optimizer,
            window,
            reference=reference,
            journal=journal,
            progress=progress,
        )
    except NothingToTrainError as error:
        _remove(journal)
        raise WindowNotReadyError(str(error)) from error
    except FloatingPointError as error:
        _remove(journal)
        raise TrainingError(str(error)) from error
    except OutOfMemoryError as error:  # keep the progress: a larger machine can resume it
        raise TrainingError(str(error)) from error
    save_checkpoint(trainable, target)
    _remove(journal)
    return Update(report=report, excluded=excluded, trajectory_ids=tuple(window.trajectory_ids))


def _redacted_text(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Token ids → text without secrets. The advice on prompt order quotes it."""
    return lambda ids: redact(str(tokenizer.decode(list(ids))))


def _remove(journal: ProgressFile | None) -> None:
    if journal is not None:
        journal.remove()


def with_behaviours(window: TrainingWindow, behaviours: Mapping[int, str]) -> TrainingWindow:
    """The window with missing logprobs recomputed under the policies that sampled the calls.

    One policy is in memory at a time.
    """
    missing: dict[int, list[int]] = defaultdict(list)
    for position, call in enumerate(window.calls):
        version = call.policy_version
        if call.logprobs is None and version is not None and version in behaviours:
            missing[version].append(position)
    logprobs: dict[int, list[float]] = {}
    for version, positions in sorted(missing.items()):
        logprobs |= _logprobs_under(behaviours[version], window, positions)
        gc.collect()  # models contain reference cycles, and the next model needs the memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return window.with_logprobs(logprobs) if logprobs else window


def _logprobs_under(
    checkpoint: str, window: TrainingWindow, positions: Sequence[int]
) -> dict[int, list[float]]:
    model, _ = load_policy(checkpoint)
    tree = window.tree.only(positions)
    fitting = FittingForward(model, window.config.max_tokens)
    values = fitting.run(lambda forward: forward.logprobs(tree)).logprobs.tolist()
    return {
        position: row[: len(window.calls[position].completion)]
        for position, row in zip(positions, values, strict=True)
    }


def _context(trainable: Trainable) -> int:
    """The model's context in tokens. Some models have no bound."""
    return int(getattr(trainable.model.config, "max_position_embeddings", sys.maxsize))
