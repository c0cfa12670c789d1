"""Copies of the tuned weights and the optimiser, to which an update can return.

Each rank keeps its own part of them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from babylon.training.grpo.shards import joined, local, with_states

Kept = dict[str, Any]  # "weights": list of tensors; "optimizer": its state; all on the host


def keep(model: nn.Module, optimizer: torch.optim.Optimizer) -> Kept:
    """Copy the present state."""
    tuned = _tuned(model)
    moments = with_states(optimizer.state_dict(), tuned, lambda value, _: local(value))
    return {"weights": _copy([local(p) for p in tuned]), "optimizer": _copy(moments)}


def put_back(kept: Kept, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore a kept state, which can be restored again."""
    with torch.no_grad():
        for parameter, value in zip(_tuned(model), kept["weights"], strict=True):
            local(parameter).copy_(value)
    optimizer.load_state_dict(with_states(_copy(kept["optimizer"]), _tuned(model), joined))
    optimizer.zero_grad(set_to_none=True)


def draw_back(kept: Kept, model: nn.Module, share: float) -> None:
    """Keep this share of the way from the kept weights to the present ones. Moments stay."""
    with torch.no_grad():
        for parameter, value in zip(_tuned(model), kept["weights"], strict=True):
            own = local(parameter)
            own.lerp_(value.to(own), 1 - share)


def _tuned(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value
