"""Tensors of which each rank holds a part (DTensor), and whole ones. Others stay as they are.

``like`` is the parameter that a tensor belongs to, such as a moment. All ranks call ``whole``
together, and ``collected`` too.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

Change = Callable[[Tensor, Tensor], Tensor]  # a value of the optimiser, its parameter → a value


def local(value: Tensor) -> Tensor:
    """This rank's part."""
    return value.to_local() if isinstance(value, DTensor) else value


def whole(value: Tensor) -> Tensor:
    """All parts in one tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def joined(part: Tensor, like: Tensor) -> Tensor:
    """A tensor of which this rank holds ``part``, on the device of ``like``."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part.to(like.to_local().device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def collected(value: Tensor, like: Tensor, *, first: bool) -> Tensor:
    """A whole tensor on the host of the ``first`` rank, and an empty one on the others.

    One that is not divided stays as it is.
    """
    if not isinstance(like, DTensor):
        return value
    found = whole(joined(local(value), like))
    return found.cpu() if first else found.new_empty(0)


def divided(value: Tensor, like: Tensor) -> Tensor:
    """A tensor of which this rank holds its part of ``value``, which all ranks have whole."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def with_states(
    state: dict[str, Any], parameters: Sequence[Tensor], change: Change
) -> dict[str, Any]:
    """An optimiser's state dictionary with other moments. Counters stay as they are."""
    return {
        **state,
        "state": {
            index: {
                name: change(value, parameters[index])
                if isinstance(value, Tensor) and value.ndim
                else value
                for name, value in values.items()
            }
            for index, values in state["state"].items()
        },
    }
