"""Divide a model and its optimiser among the ranks with FSDP2, for full fine-tuning."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from babylon.training.grpo.lockstep import LOCKSTEP, Lockstep
from babylon.training.grpo.ranks import Ranks
from babylon.training.grpo.shards import divided, with_states
from babylon.training.trainable import (
    SharedBase,
    Trainable,
    TransferLayers,
    Tuning,
    TuningOptions,
    load_trainable,
    new_optimizer,
)


class _Root(nn.Module):
    """The outermost module, which gathers the weights outside the layers for a whole pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, one: object) -> object:
        return one()  # type: ignore[operator]


def load_share(
    parent: Path | str,
    tuning: Tuning,
    layers: TransferLayers,
    options: TuningOptions,
    optimizer: str | None,
    base: SharedBase | None,
    ranks: Ranks,
) -> Trainable:
    """Load a parent as ``load_trainable``. Several ranks that tune all weights divide them."""
    # bitsandbytes has no moments that ranks could divide
    shards = ranks.size > 1 and tuning == "full" and options.optimizer == "adamw"
    device = "cpu" if shards else None  # only a part goes to the GPU
    whole = load_trainable(parent, tuning, 0.0, layers, options, optimizer, base, device)
    return _divided(whole, options, ranks) if shards else whole


def _divided(trainable: Trainable, options: TuningOptions, ranks: Ranks) -> Trainable:
    """Keep this rank's part of weights and moments, on its own device, and free the others."""
    model, state = trainable.model, trainable.optimizer.state_dict()
    rate = trainable.optimizer.param_groups[0]["lr"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mesh = init_device_mesh(device.type, (ranks.size,))
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    root = _Root(model)
    for module in (*layers, root):
        # The root too: weights that are changed between passes must be gathered again.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        made = cast(FSDPModule, module)
        made.set_gradient_divide_factor(1.0)  # the loss has one denominator for all ranks
        made.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it sums
        made.set_reduce_scatter_unused_params(True, recurse=False)  # experts that no token reached
    vars(model)[LOCKSTEP] = Lockstep(root, ranks.add, device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = new_optimizer(parameters, rate, options)
    optimizer.load_state_dict(with_states(state, parameters, divided))
    return replace(trainable, optimizer=optimizer)
