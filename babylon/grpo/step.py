"""One train step: the gradient of whole trajectories in portions that fit, then one update."""

from typing import Any

import torch
from torch import Tensor

from babylon.grpo.config import TrainerConfig
from babylon.grpo.forward import PolicyForward, Values
from babylon.grpo.losses import loss_terms
from babylon.grpo.memory import Portions
from babylon.grpo.record import Logged, Record
from babylon.grpo.window import TrainStep

TAKEN = "train_steps"  # key of an optimiser's groups: kept in its state, so warm-up happens once


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    step: TrainStep,
    config: TrainerConfig,
    portions: Portions,
    logged: Logged,
    record: Record,
    *,
    find_proximal: bool,
) -> None:
    """Update ``model`` by one step, unless all of its tokens are masked.

    Args:
        find_proximal: p is what the model says now, before it moves: no pass of its own is needed.

    Raises:
        FloatingPointError: loss or gradient is not finite; the model must be discarded.
        OutOfMemoryError: not even the smallest portion fits.
    """
    device = record.theta.device
    rows_of = torch.tensor(step.calls, device=device)
    weights = torch.tensor(step.weights, device=device)

    def attempt(forward: PolicyForward) -> Tensor:
        optimizer.zero_grad(set_to_none=True)  # of an attempt that did not fit
        total = torch.zeros((), device=device)

        def loss(calls: Any, values: Values) -> Tensor:
            chosen = torch.as_tensor(calls, device=device)
            rows = rows_of[chosen]
            if find_proximal:
                record.proximal[rows, : values.logprobs.shape[1]] = values.logprobs.detach()
            inputs = record.inputs(logged, rows, values)
            terms = loss_terms(config.loss, inputs, config.bounds, config.kl_penalty)
            record.note(rows, values, terms)
            share = (terms.loss.sum(-1) * weights[chosen]).sum()
            total.add_(share.detach())
            return share

        forward.accumulate(step.tree, loss)
        return total

    total = portions.run(attempt)
    record.forwarded_tokens += step.tree.sharing.unique_tokens
    record.trained_tokens += step.tree.sharing.trained_tokens
    if not torch.isfinite(total):
        raise FloatingPointError(f"loss is {total.item()}: lower the learning rate")
    if _all_masked(rows_of, logged, record):
        optimizer.zero_grad(set_to_none=True)  # Adam would move the model by its old moments
        return
    record.grad_norms.append(_update(optimizer, config, record))
    record.losses.append(float(total))


def _all_masked(rows: Tensor, logged: Logged, record: Record) -> bool:
    dropped = record.flags[:3, rows].any(0)
    return not bool((logged.mask[rows] & ~dropped).any())


def _update(optimizer: torch.optim.Optimizer, config: TrainerConfig, record: Record) -> float:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip)
    if not torch.isfinite(norm):
        raise FloatingPointError(f"gradient norm is {norm.item()}: lower the learning rate")
    for group in optimizer.param_groups:
        group[TAKEN] = group.get(TAKEN, 0) + 1
        group["lr"] = warm_rate(config, group[TAKEN])
        record.learning_rate = group["lr"]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)


def warm_rate(config: TrainerConfig, number: int) -> float:
    """Learning rate of an optimiser's step ``number``, from 1: a line up, then a constant."""
    return config.learning_rate * min(1.0, number / (config.warmup_steps + 1))
