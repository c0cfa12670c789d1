"""Training input: trajectories with a score, their calls as exact tokens, and padded batches.

A call is one prompt and one completion; several calls make a trajectory, trajectories of one
(window, scenario) make a group. Only completion tokens are ever trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTokens:
    """One logged request. ``logprobs`` ``[T]`` are the behaviour policy's, None if unlogged."""

    prompt: Sequence[int]
    completion: Sequence[int]
    logprobs: Sequence[float] | None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.prompt or not self.completion:
            raise ValueError(
                f"a call needs prompt and completion tokens, got {len(self.prompt)} and"
                f" {len(self.completion)}: leave it out of the batch"
            )
        if self.logprobs is not None and len(self.logprobs) != len(self.completion):
            raise ValueError(
                f"{len(self.completion)} completion tokens but {len(self.logprobs)} logprobs:"
                " pass None when they were not logged exactly"
            )
        if self.temperature <= 0:
            raise ValueError(f"temperature {self.temperature} cannot be trained: it must be > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """What GRPO needs of a trajectory: the group it is compared in, its score and its calls."""

    trajectory_id: str
    group: str
    score: float
    calls: Sequence[CallTokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedCall:
    """A call with the advantage of its trajectory and its share of the loss.

    ``weight`` is ``1 / (K * C)``: K calls in the trajectory, C the window's mean completion
    length, so every trajectory has the same mass and long completions are neither rewarded nor
    punished. The number of trajectories is divided out per optimiser step.
    """

    tokens: CallTokens
    trajectory: int
    advantage: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBatch:
    """C calls, padded on the right: prompts and completions to L, completions alone to T.

    input_ids ``[C, L]``; targets, mask, mu, has_mu ``[C, T]``; starts, temperature, advantage,
    weight ``[C]``. ``starts`` is the position of the last prompt token, which predicts targets[0].
    """

    input_ids: Tensor
    starts: Tensor
    targets: Tensor
    mask: Tensor
    mu: Tensor
    has_mu: Tensor
    temperature: Tensor
    advantage: Tensor
    weight: Tensor


def make_batch(calls: Sequence[WeightedCall], device: torch.device | str = "cpu") -> CallBatch:
    """Pad calls into one batch. The padding id is 0: causal attention never looks at it."""
    total = max(len(c.tokens.prompt) + len(c.tokens.completion) for c in calls)
    longest = max(len(c.tokens.completion) for c in calls)
    input_ids = torch.zeros(len(calls), total, dtype=torch.long)
    targets = torch.zeros(len(calls), longest, dtype=torch.long)
    mask = torch.zeros(len(calls), longest, dtype=torch.bool)
    mu = torch.zeros(len(calls), longest)
    for row, call in enumerate(calls):
        tokens = call.tokens
        ids = torch.tensor([*tokens.prompt, *tokens.completion])
        input_ids[row, : len(ids)] = ids
        length = len(tokens.completion)
        targets[row, :length] = ids[len(tokens.prompt) :]
        mask[row, :length] = True
        if tokens.logprobs is not None:
            mu[row, :length] = torch.tensor(tokens.logprobs)
    has_mu = torch.tensor([c.tokens.logprobs is not None for c in calls])[:, None] & mask
    return CallBatch(
        input_ids=input_ids.to(device),
        starts=torch.tensor([len(c.tokens.prompt) - 1 for c in calls], device=device),
        targets=targets.to(device),
        mask=mask.to(device),
        mu=mu.to(device),
        has_mu=has_mu.to(device),
        temperature=torch.tensor([c.tokens.temperature for c in calls], device=device),
        advantage=torch.tensor([c.advantage for c in calls], device=device),
        weight=torch.tensor([c.weight for c in calls], device=device),
    )
