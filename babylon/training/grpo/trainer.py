"""GRPO on one logged window: a pass is called an iteration, an optimiser update a train step.

Whole trajectories make a train step, and their calls are run in portions whose gradients add up:
the denominator is the step's, never the portion's. Remaining iterations are dropped once the
policy has moved far enough from where the window started (k3 or clip fraction).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

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
    Window,
    refuse_missing_logprobs,
)
from babylon.training.grpo.update_record import Logged, Record

__all__ = ["NothingToTrainError", "Progress", "TrainReport", "TrainerConfig", "train_on_window"]
Progress = Callable[[int, int], None]  # train steps done, of at most so many


class Journal(Protocol):
    """Where an update's progress is kept, with its weights and its optimiser."""

    def restore(self) -> dict[str, Any] | None:
        """Put weights and optimiser back as they were saved; returns the record's state."""

    def save(self, state: dict[str, Any]) -> None:
        """Keep weights, optimiser and state, all of them or none."""


def train_on_window(
    model: Any,
    optimizer: torch.optim.Optimizer,
    window: Window,
    *,
    reference: AbstractContextManager[object] | None = None,
    journal: Journal | None = None,
    progress: Progress | None = None,
) -> TrainReport:
    """Update ``model`` in place on one window.

    Args:
        reference: entered to turn ``model`` into the reference policy (adapters off); needed
            only with a KL penalty.
        journal: where an interrupted update goes on, and leaves off.

    Raises:
        NothingToTrainError: the window teaches nothing; the model is unchanged.
        FloatingPointError: the loss or gradient is not finite; the model must be discarded.
        OutOfMemoryError: not even the smallest portion fits; the model must be discarded.
    """
    refuse_missing_logprobs(window)
    state = _begin(model, optimizer, window, reference, journal)
    record, stopped = state.record, False
    iterations, steps = window.config.iterations, window.steps_an_iteration
    while record.iteration <= iterations and not stopped:
        for step in window.steps(record.iteration)[record.step :]:
            train_step(state, step)
            done = (record.iteration - 1) * steps + record.step
            if progress is not None:
                progress(done, iterations * steps)
            if journal is not None and done < iterations * steps:
                journal.save(record.state())
        stopped = _moved_far(state)
        record.iteration, record.step = record.iteration + 1, 0
    if not record.grad_norms:
        raise NothingToTrainError(
            f"every one of the {window.tokens} tokens is masked: the logged logprobs are not those"
            " of the policy that is trained; compare their versions and tokenizers"
        )
    return make_report(state, after=state.fitting.run(_values(window.tree)))


def _begin(
    model: Any,
    optimizer: torch.optim.Optimizer,
    window: Window,
    reference: AbstractContextManager[object] | None,
    journal: Journal | None,
) -> TrainState:
    """From where the journal left off, or from the start."""
    device = next(model.parameters()).device
    logged = Logged.of(window, device)
    fitting = FittingForward(model, window.config.max_tokens)
    saved = None if journal is None else journal.restore()
    if saved is None:
        record = _start(model, window, fitting, logged, reference)
    else:
        record = Record.from_state(saved, device)
        fitting.restore(record.halvings)
    return TrainState(
        model=model,
        optimizer=optimizer,
        window=window,
        fitting=fitting,
        logged=logged,
        record=record,
    )


def _start(
    model: Any,
    window: Window,
    fitting: FittingForward,
    logged: Logged,
    reference: AbstractContextManager[object] | None,
) -> Record:
    """p and the reference, once for the whole update.

    One full-window step an iteration makes p free: the first iteration's forward pass is p's.
    """
    anchored = None
    if window.config.kl_penalty:
        if reference is None:
            raise ValueError("a KL penalty needs a reference policy")
        with reference:
            anchored = fitting.run(_values(window.tree))
    free = window.steps_an_iteration == 1
    proximal = torch.zeros_like(logged.mu) if free else fitting.run(_values(window.tree))
    return Record.start(proximal, anchored, weight_sample(model))


def _values(tree: PrefixTree) -> Callable[[PolicyForward], Tensor]:
    return lambda forward: forward.logprobs(tree).logprobs


def _moved_far(state: TrainState) -> bool:
    config = state.window.config
    if kl_of_iteration(state.logged, state.record) > config.stop_kl:
        return True
    clipped = clip_fraction(state.logged, state.record)
    return LOSSES[config.loss].clip_is_far and clipped > config.stop_clip_fraction
