"""Supervised fine-tuning (SFT) of a checkpoint on the replies of given chats.

One pass over the chats. A batch is one optimiser step, and its loss is the mean negative
log-likelihood of the batch's reply tokens. Prompts that the batch's calls share are read once.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from babylon.core.errors import TrainingError
from babylon.core.memory import free_memory_is_kept
from babylon.core.trajectories import TrainingRow
from babylon.training.call_tokens import log_left_out, scored_trajectories
from babylon.training.grpo.forward import FittingForward, OutOfMemoryError, PolicyForward
from babylon.training.grpo.prefix_tree import compile_tree
from babylon.training.grpo.training_input import CallTokens
from babylon.training.grpo.tree_forward import Values
from babylon.training.learning_rate import supervised_rates
from babylon.training.trainable import (
    DEFAULT_OPTIONS,
    Tuning,
    TuningOptions,
    load_trainable,
    save_checkpoint,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SftStep:
    """One optimiser step."""

    loss: float  # mean, nats a token
    tokens: int
    learning_rate: float
    grad_norm: float
    chats: int = 0  # with a reply to learn from


@free_memory_is_kept()
def fine_tune(
    parent: Path | str,
    rows: Sequence[TrainingRow],
    target: Path,
    *,
    tuning: Tuning,
    batch_size: int,
    learning_rates: Iterator[float] | None = None,
    options: TuningOptions = DEFAULT_OPTIONS,
) -> list[SftStep]:
    """Train on the replies of ``rows``, ``batch_size`` rows a step. Scores are ignored.

    Without ``learning_rates``, the model's size decides.

    Raises:
        TrainingError: there are no replies or too few rates, the loss is not finite, or a batch
            does not fit into memory; nothing was written.
        ModelError: the parent does not load.
    """
    trainable = load_trainable(parent, tuning, 0.0, options=options)
    model = trainable.model
    context = int(getattr(model.config, "max_position_embeddings", None) or sys.maxsize)
    vocabulary = model.config.vocab_size
    scored, excluded = scored_trajectories(trainable.tokenizer, rows, context, vocabulary)
    log_left_out(sum(len(row.calls) for row in rows), excluded)
    chats = [trajectory.calls for trajectory in scored]
    if not chats:
        raise TrainingError(f"none of the {len(rows)} chats has a reply to learn from")
    count = -(-len(chats) // batch_size)
    if learning_rates is None:
        learning_rates = iter(supervised_rates(model, tuning, count))
    fitting = FittingForward(model, None, trainable.optimizer.param_groups)
    steps = list[SftStep]()
    for start in range(0, len(chats), batch_size):
        if (rate := next(learning_rates, None)) is None:  # in a thread StopIteration hangs asyncio
            raise TrainingError(
                f"there are {len(steps)} learning rates for {count} batches of {batch_size} chats:"
                " give one for each batch"
            )
        for group in trainable.optimizer.param_groups:
            group["lr"] = rate
        calls = [call for chat in chats[start : start + batch_size] for call in chat]
        step = _step(fitting, trainable.optimizer, calls, rate)
        steps.append(replace(step, chats=len(chats[start : start + batch_size])))
    fitting.remember(trainable.optimizer.param_groups)
    save_checkpoint(trainable, target)
    return steps


def _step(
    fitting: FittingForward,
    optimizer: torch.optim.Optimizer,
    calls: Sequence[CallTokens],
    rate: float,
) -> SftStep:
    tokens = sum(len(call.completion) for call in calls)
    # what was sampled at a temperature is learnt as the model's own distribution
    tree = compile_tree([replace(call, temperature=1.0) for call in calls])

    def attempt(forward: PolicyForward) -> float:
        optimizer.zero_grad(set_to_none=True)
        losses = list[Tensor]()

        def loss(_: Sequence[int], values: Values) -> Tensor:
            part = -values.logprobs.sum() / tokens
            losses.append(part.detach())  # its graph would keep all portions' keys and values
            return part

        forward.accumulate(tree, loss)
        return sum(float(one) for one in losses)

    try:
        total = fitting.run(attempt)
    except OutOfMemoryError as error:
        raise TrainingError(str(error)) from error
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
    if not torch.isfinite(torch.tensor([total, norm])).all():
        raise TrainingError(f"loss is {total}, gradient norm {norm}: lower the learning rate")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return SftStep(loss=total, tokens=tokens, learning_rate=rate, grad_norm=norm)
