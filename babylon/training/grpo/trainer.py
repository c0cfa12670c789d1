"""GRPO on one logged window. An iteration is one pass over it, a train step one optimiser update.

A train step trains whole trajectories. Their calls run in portions whose gradients add up: the
loss is divided by the step's denominator, never by a portion's. Training stops early once the
policy has moved far enough from the parent (k3 or clip fraction).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.diagnostics import (
    clip_fraction,
    kl_of_iteration,
    make_report,
    weight_sample,
)
from babylon.training.grpo.forward import PolicyForward
from babylon.training.grpo.losses import LOSSES
from babylon.training.grpo.memory import FittingForward
from babylon.training.grpo.prefix_tree import PrefixTree
from babylon.training.grpo.train_report import TrainReport
from babylon.training.grpo.train_step import TrainState, train_step
from babylon.training.grpo.training_window import (
    NothingToTrainError,
    TrainingWindow,
    refuse_missing_logprobs,
)
from babylon.training.grpo.update_record import Logged, RecordState, UpdateRecord

__all__ = ["NothingToTrainError", "Progress", "TrainReport", "TrainerConfig", "train_on_window"]
Progress = Callable[[int, int], None]  # train steps done, and their highest possible number


class Journal(Protocol):
    """Storage of an update's progress, with its weights and its optimiser."""

    def restore(self) -> RecordState | None:
        """Restore weights and optimiser, and return the record's state. None: nothing saved."""

    def save(self, state: RecordState) -> None:
        """Save weights, optimiser and state, all of them or none."""


def train_on_window(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    window: TrainingWindow,
    *,
    reference: AbstractContextManager[object] | None = None,
    journal: Journal | None = None,
    progress: Progress | None = None,
) -> TrainReport:
    """Update ``model`` in place on one window.

    Args:
        reference: context in which ``model`` is the reference policy (adapters off). Needed only
            for a KL penalty.
        journal: saves the progress, and resumes an interrupted update.

    Raises:
        NothingToTrainError: the window teaches nothing; the model is unchanged.
        FloatingPointError: the loss or gradient is not finite; discard the model.
        OutOfMemoryError: the smallest portion does not fit; discard the model.
    """
    refuse_missing_logprobs(window)
    state = _begin(model, optimizer, window, reference, journal)
    record, moved_far = state.record, False
    iterations, steps = window.config.iterations, window.steps_an_iteration
    while record.iteration <= iterations and not moved_far:
        for step in window.steps(record.iteration)[record.step :]:
            train_step(state, step)
            done = (record.iteration - 1) * steps + record.step
            if progress is not None:
                progress(done, iterations * steps)
            if journal is not None and done < iterations * steps:
                journal.save(record.state())
        moved_far = _moved_far(state)
        record.iteration, record.step = record.iteration + 1, 0
    if not record.grad_norms:
        raise NothingToTrainError(
            f"every one of the {window.tokens} tokens is masked: the logged logprobs are not those"
            " of the trained policy; compare their versions and tokenizers"
        )
    return make_report(state, after=state.fitting.run(_logprobs(window.tree)))


def _begin(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    window: TrainingWindow,
    reference: AbstractContextManager[object] | None,
    journal: Journal | None,
) -> TrainState:
    """The state that the journal saved, or a new one."""
    device = next(model.parameters()).device
    logged = Logged.of(window, device)
    fitting = FittingForward(model, window.config.max_tokens)
    saved = None if journal is None else journal.restore()
    if saved is None:
        record = _frozen_policies(model, window, fitting, logged, reference)
    else:
        record = UpdateRecord.from_state(saved, device)
        fitting.restore(record.halvings)
    return TrainState(
        model=model,
        optimizer=optimizer,
        window=window,
        fitting=fitting,
        logged=logged,
        record=record,
    )


def _frozen_policies(
    model: nn.Module,
    window: TrainingWindow,
    fitting: FittingForward,
    logged: Logged,
    reference: AbstractContextManager[object] | None,
) -> UpdateRecord:
    """A new record with the logprobs of p and of the reference, computed once an update.

    If an iteration is one step, p costs nothing: the first iteration's forward pass is p's.
    """
    anchored = None
    if window.config.kl_penalty:
        if reference is None:
            raise ValueError("a KL penalty needs a reference policy")
        with reference:
            anchored = fitting.run(_logprobs(window.tree))
    free = window.steps_an_iteration == 1
    proximal = torch.zeros_like(logged.mu) if free else fitting.run(_logprobs(window.tree))
    return UpdateRecord.start(proximal, anchored, weight_sample(model))


def _logprobs(tree: PrefixTree) -> Callable[[PolicyForward], Tensor]:
    return lambda forward: forward.logprobs(tree).logprobs


def _moved_far(state: TrainState) -> bool:
    config = state.window.config
    if kl_of_iteration(state.logged, state.record) > config.stop_kl:
        return True
    clipped = clip_fraction(state.logged, state.record)
    return LOSSES[config.loss].clip_is_far and clipped > config.stop_clip_fraction
