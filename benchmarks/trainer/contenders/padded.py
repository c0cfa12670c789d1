"""Parts shared by trainers that pad: micro-batches, parts of a window, and padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.trainer.cases import PADDING, Call
from benchmarks.trainer.flops import Work

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """B calls: prompts padded on one side, completions on the right; masks are 0 on padding."""

    prompt_ids: Tensor  # [B, P]
    prompt_mask: Tensor  # [B, P]
    completion_ids: Tensor  # [B, T]
    completion_mask: Tensor  # [B, T]
    mu: Tensor | None  # [B, T]
    advantages: Tensor  # [B]


def left_padded(calls: Sequence[Call]) -> Padded:
    """TRL's layout of a batch: all completions start at the same column."""
    mu = [call.mu for call in calls if call.mu is not None]
    return Padded(
        prompt_ids=_pad([call.prompt for call in calls], left=True),
        prompt_mask=_pad([np.ones(len(c.prompt), dtype=np.int64) for c in calls], left=True),
        completion_ids=_pad([call.completion for call in calls]),
        completion_mask=_pad([np.ones(len(c.completion), dtype=np.int64) for c in calls]),
        mu=_pad(mu) if mu else None,
        advantages=torch.tensor([call.advantage for call in calls]),
    )


def _pad(rows: Sequence[NDArray[Any]], *, left: bool = False) -> Tensor:
    width = max(len(row) for row in rows)
    padded = np.full((len(rows), width), PADDING, dtype=rows[0].dtype)
    for target, row in zip(padded, rows, strict=True):
        target[width - len(row) if left else 0 : width if left else len(row)] = row
    return torch.from_numpy(padded)


def right_padded(calls: Sequence[Call]) -> Tensor:
    """Prompts and completions together ``[B, L]``."""
    return _pad([np.concatenate([call.prompt, call.completion]) for call in calls])


def by_length(calls: Sequence[Call]) -> list[Call]:
    return sorted(calls, key=len, reverse=True)


def chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Portions of ``size``. The last can be smaller."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def token_chunks(calls: Sequence[Call], size: int) -> list[Sequence[Call]]:
    """Portions of calls of similar length, of about as many tokens as ``size`` average calls."""
    budget = size * sum(len(call) for call in calls) / len(calls)
    portions: list[list[Call]] = [[]]
    for call in by_length(calls):
        if portions[-1] and len(portions[-1][0]) * (len(portions[-1]) + 1) > 1.01 * budget:
            portions.append([])
        portions[-1].append(call)
    return list(portions)


def deal(works: Sequence[Work], parts: int) -> list[list[int]]:
    """Micro-batches dealt in turn to at most ``parts`` parts, the largest first.

    In that order, and back again, so that long and short ones are in every part.
    """
    count = min(parts, len(works))
    order = sorted(range(len(works)), key=lambda i: works[i].tokens, reverse=True)
    dealt: list[list[int]] = [[] for _ in range(count)]
    for place, index in enumerate(order):
        turn, seat = divmod(place, count)
        dealt[seat if turn % 2 == 0 else count - 1 - seat].append(index)
    return dealt
