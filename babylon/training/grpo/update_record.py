"""The running record of an update: each policy's logprobs of each token, and the steps' figures.

The report is computed from it. Together with weights and optimiser, it resumes an interrupted
update.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from babylon.training.grpo.losses import LossInputs, LossTerms
from babylon.training.grpo.memory import FittingForward
from babylon.training.grpo.training_window import TrainingWindow
from babylon.training.grpo.tree_forward import Values

FLAGS = ("band", "negative", "impossible", "clipped_low", "clipped_high")
RecordState = dict[str, Any]  # field → value: tensors, numbers and lists of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """The window as tensors: C calls of up to T completion tokens."""

    mu: Tensor  # [C, T], behaviour logprobs, 0 where unknown
    known: Tensor  # [C, T] bool, where mu is known
    exact: Tensor  # [C, T] bool, where mu was logged by the parent itself
    mask: Tensor  # [C, T] bool, the completion tokens
    advantage: Tensor  # [C]

    @classmethod
    def of(cls, window: TrainingWindow, device: torch.device) -> "Logged":
        """The tensors of a window, on a device."""
        mu = torch.zeros(len(window.calls), max(window.lengths))
        mask = torch.zeros_like(mu, dtype=torch.bool)
        known, exact = mask.clone(), mask.clone()
        for row, (call, length) in enumerate(zip(window.calls, window.lengths, strict=True)):
            mask[row, :length] = True
            if call.logprobs is not None:
                mu[row, :length] = torch.tensor(call.logprobs)
                known[row, :length] = True
                exact[row, :length] = not call.recomputed and window.staleness[row] == 0
        advantage = [window.advantages[trajectory] for trajectory in window.trajectory_of]
        return cls(
            mu=mu.to(device),
            known=known.to(device),
            exact=exact.to(device),
            mask=mask.to(device),
            advantage=torch.tensor(advantage, device=device),
        )


@dataclass(slots=True, kw_only=True)
class UpdateRecord:
    """State of an update besides weights and optimiser.

    ``theta``, ``entropy`` and ``flags`` are from the last iteration, each call's before the train
    step that trained it moved the model.
    """

    proximal: Tensor  # [C, T], logprobs of the parent
    reference: Tensor | None  # [C, T], logprobs of the reference policy
    theta: Tensor  # [C, T], logprobs of the model in training
    entropy: Tensor  # [C, T]
    flags: Tensor  # [5, C, T] bool, in the order of FLAGS
    weights_before: list[Tensor]
    losses: list[float]  # of the train steps that moved the model
    grad_norms: list[float]
    iteration: int = 1
    step: int = 0  # finished train steps of the iteration
    learning_rate: float = 0.0  # of the last train step
    halvings: int = 0
    training_s: float = 0.0
    forwarded_tokens: int = 0  # unique tokens, in train steps
    trained_tokens: int = 0

    @classmethod
    def start(
        cls, proximal: Tensor, reference: Tensor | None, weights: list[Tensor]
    ) -> "UpdateRecord":
        """The record of an update that has not trained yet."""
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

    def state(self) -> RecordState:
        """The record as a dictionary for ``torch.save``."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state(cls, state: RecordState, device: torch.device) -> "UpdateRecord":
        """The record with this ``state``, its tensors moved to ``device``."""

        def moved(value: object) -> object:
            if isinstance(value, list):
                return [moved(item) for item in value]
            return value.to(device) if isinstance(value, Tensor) else value

        fields_on_device: RecordState = {name: moved(value) for name, value in state.items()}
        return cls(**fields_on_device)

    def inputs(self, logged: Logged, rows: Tensor, values: Values) -> LossInputs:
        """The inputs of the loss for some calls, as wide as their longest completion."""
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
        """Store a train step's values and flags of some calls."""
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


@dataclass(frozen=True, slots=True)
class TrainState:
    """A running update. Model, optimiser, fitting and record change in place."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    window: TrainingWindow
    fitting: FittingForward
    logged: Logged
    record: UpdateRecord
