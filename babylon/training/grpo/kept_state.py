"""Copies of the tuned weights and the optimiser, to which an update can return.

Each rank keeps its own part of them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from babylon.training.grpo.shards import joined, local, with_states

Kept = dict[str, Any]  # "weights": list of tensors; "optimizer": its state; all on the host


def keep(model: nn.Module, optimizer: torch.optim.Optimizer, last: Kept | None = None) -> Kept:
    """Copy the present state, over the tensors of the ``last`` one: new memory is slower."""
    tuned = _tuned(model)
    moments = with_states(optimizer.state_dict(), tuned, lambda value, _: local(value))
    now = {"weights": [local(p) for p in tuned], "optimizer": moments}
    copy: Kept = _copy(now, last)
    return copy


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


def _copy(value: Any, over: Any = None) -> Any:
    """Copy to the host, over the tensors of another copy where they have the same form."""
    if isinstance(value, Tensor):
        alike = isinstance(over, Tensor) and (over.shape, over.dtype) == (value.shape, value.dtype)
        return over.copy_(value.detach()) if alike else value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        old = over if isinstance(over, dict) else {}
        return {key: _copy(item, old.get(key)) for key, item in value.items()}
    if isinstance(value, list):
        known = over if isinstance(over, list) and len(over) == len(value) else [None] * len(value)
        return [_copy(item, before) for item, before in zip(value, known, strict=True)]
    return value
