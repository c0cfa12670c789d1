"""The strongest baseline when lengths differ: plain transformers, padded on the right.

Calls of similar length together, about as many tokens in every micro-batch; PyTorch's causal
attention without a mask; head and cross-entropy only at completion positions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.trainer.cases import Call
from benchmarks.trainer.contenders import Session, Task
from benchmarks.trainer.contenders.local import LocalSession, policy
from benchmarks.trainer.contenders.padded import (
    Padded,
    deal,
    left_padded,
    right_padded,
    token_chunks,
)
from benchmarks.trainer.flops import NOTHING, Work, flop, rows_work
from benchmarks.trainer.models import shape_of

CLIP = 0.2


class NaiveSession(LocalSession):
    """One tensor batch a micro-batch, made before timing."""

    def __init__(self, task: Task) -> None:
        super().__init__(policy(task), task)
        portions = token_chunks(task.window.calls, task.micro_batch)
        works = [_work(portion) for portion in portions]
        self.work = sum(works, NOTHING)
        self.parts = deal(works, task.parts)
        shape = shape_of(task.config)
        whole = flop(shape, self.work, task.tuning)
        costs = [flop(shape, work, task.tuning) for work in works]
        self.shares = [sum(costs[i] for i in part) / whole for part in self.parts]
        self.batches = [_Batch(portion) for portion in portions]
        self.trained = task.window.trained_tokens

    def accumulate(self, part: int) -> None:
        for index in self.parts[part]:
            loss = surrogate(self._logprobs(self.batches[index]), self.batches[index].padded)
            (loss / self.trained).backward()  # type: ignore[no-untyped-call]

    def _logprobs(self, batch: "_Batch") -> Tensor:
        hidden = self.backbone(batch.ids)
        kept = hidden[torch.arange(len(hidden))[:, None], batch.positions]
        logits = self.head(kept)
        flat = cross_entropy(
            logits.flatten(0, 1), batch.padded.completion_ids.flatten(), reduction="none"
        )
        return -flat.view_as(batch.padded.completion_ids)


class _Batch:
    """B calls padded on the right; positions ``[B, T]`` predict the completion."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.ids = right_padded(calls)
        self.padded: Padded = left_padded(calls)
        steps = torch.arange(self.padded.completion_ids.shape[1])
        starts = torch.tensor([len(call.prompt) - 1 for call in calls])
        lengths = torch.tensor([len(call.completion) for call in calls])
        self.positions = starts[:, None] + torch.minimum(steps, lengths[:, None] - 1)


def _work(calls: Sequence[Call]) -> Work:
    longest = max(len(call.completion) for call in calls)
    return rows_work([max(map(len, calls))] * len(calls), len(calls) * longest)


def surrogate(logprobs: Tensor, batch: Padded) -> Tensor:
    """PPO's clipped surrogate, summed over the completion tokens ``[B, T]``."""
    old = logprobs.detach() if batch.mu is None else batch.mu
    ratio = torch.exp(logprobs - old)
    advantage = batch.advantages[:, None]
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    tokens = -torch.minimum(ratio * advantage, clipped * advantage)
    return (tokens * batch.completion_mask).sum()


def open_session(task: Task, variant: str) -> Session:
    return NaiveSession(task)
