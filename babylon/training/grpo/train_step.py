"""One train step: the gradient of whole trajectories, portion by portion, then one update."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.forward import PolicyForward
from babylon.training.grpo.losses import loss_terms
from babylon.training.grpo.memory import FittingForward, OutOfMemoryError, is_out_of_memory
from babylon.training.grpo.training_window import TrainingWindow, TrainStep
from babylon.training.grpo.tree_forward import Values
from babylon.training.grpo.update_record import Logged, UpdateRecord

TAKEN = "train_steps"  # count in the optimiser's groups; saved with it, so it warms up only once


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """A running update. Model, optimiser, fitting and record change in place."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    window: TrainingWindow
    fitting: FittingForward
    logged: Logged
    record: UpdateRecord


def train_step(state: TrainState, step: TrainStep) -> None:
    """Update the model by one step, unless all of the step's tokens are masked.

    Raises:
        FloatingPointError: loss or gradient is not finite; discard the model.
        OutOfMemoryError: the smallest portion or the optimiser's moments do not fit.
    """
    started, record = time.monotonic(), state.record
    rows = torch.tensor(step.calls, device=record.theta.device)
    total = state.fitting.run(lambda forward: _accumulate(state, step, rows, forward))
    if not torch.isfinite(total):
        raise FloatingPointError(f"loss is {total.item()}: lower the learning rate")
    if _all_masked(rows, state):  # skip: Adam would still move the model by its moments
        state.optimizer.zero_grad(set_to_none=True)
    else:
        record.grad_norms.append(_update(state.optimizer, state.window.config, record))
        record.losses.append(float(total))
    record.step += 1
    record.halvings = state.fitting.halvings
    record.forwarded_tokens += step.tree.unique_tokens
    record.trained_tokens += sum(len(call.completion) for call in step.tree.calls)
    record.training_s += time.monotonic() - started


def _accumulate(state: TrainState, step: TrainStep, rows: Tensor, forward: PolicyForward) -> Tensor:
    """Accumulate the step's gradient, portion by portion, and return the step's loss."""
    state.optimizer.zero_grad(set_to_none=True)  # clear an attempt that did not fit
    config, record = state.window.config, state.record
    p_is_free = record.iteration == state.window.steps_an_iteration == 1
    weights = torch.tensor(step.weights, device=rows.device)
    total = torch.zeros((), device=rows.device)

    def loss(calls: Sequence[int], values: Values) -> Tensor:
        chosen = torch.tensor(calls, device=rows.device)
        if p_is_free:  # the model has not moved yet, so theta is p
            width = values.logprobs.shape[1]
            record.proximal[rows[chosen], :width] = values.logprobs.detach()
        inputs = record.inputs(state.logged, rows[chosen], values)
        terms = loss_terms(config.loss, inputs, config.bounds, config.kl_penalty)
        record.note(rows[chosen], values, terms)
        share = (terms.loss.sum(-1) * weights[chosen]).sum()
        total.add_(share.detach())
        return share

    forward.accumulate(step.tree, loss)
    return total


def _all_masked(rows: Tensor, state: TrainState) -> bool:
    dropped = state.record.flags[:3, rows].any(0)
    return not bool((state.logged.mask[rows] & ~dropped).any())


def _update(optimizer: torch.optim.Optimizer, config: TrainerConfig, record: UpdateRecord) -> float:
    """Clip the gradient, take the optimiser's step, and return the gradient norm."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip)
    if not torch.isfinite(norm):
        raise FloatingPointError(f"gradient norm is {norm.item()}: lower the learning rate")
    for group in optimizer.param_groups:
        group[TAKEN] = group.get(TAKEN, 0) + 1
        group["lr"] = warm_rate(config, group[TAKEN])
        record.learning_rate = group["lr"]
    try:
        optimizer.step()
    except (RuntimeError, MemoryError) as error:  # no retry: half a step may have been taken
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            "out of memory in the optimiser, whose moments take twice the memory of the tuned"
            f" weights ({error}): train with TUNING=lora, a smaller BASE_MODEL, or more memory"
        ) from error
    optimizer.zero_grad(set_to_none=True)
    return float(norm)


def warm_rate(config: TrainerConfig, number: int) -> float:
    """Learning rate of the optimiser's step ``number`` (from 1): linear warm-up, then constant."""
    return config.learning_rate * min(1.0, number / (config.warmup_steps + 1))
