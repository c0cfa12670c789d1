"""The running record of an update: what each policy said of each token, and how the steps went.

It is all that an interrupted update needs besides weights and optimiser, and all that the report
is made from.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from babylon.training.grpo.forward import Values
from babylon.training.grpo.losses.shared import LossInputs, LossTerms
from babylon.training.grpo.training_window import Window

FLAGS = ("band", "negative", "impossible", "clipped_low", "clipped_high")


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """What the window says of its tokens, ``[C, T]``; advantage and staleness ``[C]``."""

    mu: Tensor
    known: Tensor
    exact: Tensor  # known, logged by the policy that is being updated, and not recomputed
    mask: Tensor
    advantage: Tensor

    @classmethod
    def of(cls, window: Window, device: torch.device) -> "Logged":
        longest = max(len(call.tokens.completion) for call in window.calls)
        mu = torch.zeros(len(window.calls), longest)
        mask = torch.zeros(len(window.calls), longest, dtype=torch.bool)
        known, exact = mask.clone(), mask.clone()
        for row, call in enumerate(window.calls):
            tokens, length = call.tokens, len(call.tokens.completion)
            mask[row, :length] = True
            if tokens.logprobs is not None:
                mu[row, :length] = torch.tensor(tokens.logprobs)
                known[row, :length] = True
                exact[row, :length] = not tokens.recomputed and window.staleness[row] == 0
        return cls(
            mu=mu.to(device),
            known=known.to(device),
            exact=exact.to(device),
            mask=mask.to(device),
            advantage=torch.tensor([call.advantage for call in window.calls], device=device),
        )


@dataclass(slots=True, kw_only=True)
class Record:
    """Of the last iteration: theta, entropy ``[C, T]`` and flags ``[5, C, T]`` as each step saw
    them before it moved. ``proximal`` and ``reference`` ``[C, T]`` are of the whole update."""

    proximal: Tensor
    reference: Tensor | None
    theta: Tensor
    entropy: Tensor
    flags: Tensor
    weights_before: list[Tensor]
    losses: list[float]  # of the train steps that moved the model
    grad_norms: list[float]
    iteration: int = 1
    step: int = 0  # train steps of the iteration that are done
    learning_rate: float = 0.0  # of the last train step
    halvings: int = 0
    training_s: float = 0.0
    forwarded_tokens: int = 0  # unique ones, by train steps
    trained_tokens: int = 0

    @classmethod
    def start(cls, proximal: Tensor, reference: Tensor | None, weights: list[Tensor]) -> "Record":
        flags = torch.zeros(len(FLAGS), *proximal.shape, dtype=torch.bool, device=proximal.device)
        return cls(
            proximal=proximal,
            reference=reference,
            theta=torch.zeros_like(proximal),
            entropy=torch.zeros_like(proximal),
            flags=flags,
            weights_before=weights,
            losses=[],
            grad_norms=[],
        )

    def state(self) -> dict[str, Any]:
        """Tensors and plain numbers, as ``torch.save`` takes them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> "Record":
        """The record that ``state`` was taken of."""

        def moved(value: Any) -> Any:
            if isinstance(value, list):
                return [moved(item) for item in value]
            return value.to(device) if isinstance(value, Tensor) else value

        return cls(**{name: moved(value) for name, value in state.items()})

    def inputs(self, logged: Logged, rows: Tensor, values: Values) -> LossInputs:
        """The loss's view of some calls, no wider than their longest completion."""
        width = values.logprobs.shape[1]

        def part(tensor: Tensor) -> Tensor:
            return tensor[rows, :width]

        return LossInputs(
            theta=values.logprobs,
            proximal=part(self.proximal),
            mu=part(logged.mu),
            known=part(logged.known),
            mask=part(logged.mask),
            advantage=logged.advantage[rows],
            reference=None if self.reference is None else part(self.reference),
        )

    def note(self, rows: Tensor, values: Values, terms: LossTerms) -> None:
        """What a train step saw of some calls."""
        width = values.logprobs.shape[1]
        self.theta[rows, :width] = values.logprobs.detach()
        self.entropy[rows, :width] = values.entropy
        self.flags[:, rows, :width] = torch.stack(
            [
                terms.masks.band,
                terms.masks.negative,
                terms.masks.impossible,
                terms.clipped_low,
                terms.clipped_high,
            ]
        )
