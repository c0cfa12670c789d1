"""Passes of ranks that hold a part of the weights each, and therefore pass layer by layer together.

A sharded model (FSDP2) gathers a layer's weights from all ranks in each pass, and sums its gradient
over them. All ranks must run the same passes in the same order, and shares of a tree have different
numbers of them. Before each pass the ranks agree on its kind: without gradient if any rank needs
that, else with gradient. A rank that needs another kind, or nothing more, passes one token, whose
loss is zero.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
Idle = Callable[[bool], None]  # passes one token, with gradient or without
LOCKSTEP = "lockstep"  # attribute of a sharded model, with its passes


class Passes(Protocol):
    """The forward passes of a model."""

    @property
    def together(self) -> bool:
        """Whether all ranks must run each pass, so that none of them can repeat one."""

    def run(self, one: Callable[[], T], idle: Idle) -> T:
        """Return ``one()``, which calls the model once. Tensors that it returns have gradients."""

    def finish(self, idle: Idle) -> None:
        """Accompany the passes of the other ranks until none is left."""


class OwnPasses:
    """The passes of a process that holds all weights."""

    together = False

    def run(self, one: Callable[[], T], idle: Idle) -> T:
        """Return ``one()``."""
        return one()

    def finish(self, idle: Idle) -> None:
        """Wait for nobody."""


class Lockstep:
    """The passes of a sharded model. ``root`` is the outermost sharded module, which calls ``one``.

    ``add`` sums a tensor over all ranks, in place.
    """

    together = True

    def __init__(
        self, root: nn.Module, add: Callable[[Tensor], None], device: torch.device
    ) -> None:
        self._root, self._add, self._device = root, add, device
        self._idles = False

    def run(self, one: Callable[[], T], idle: Idle) -> T:
        """Return ``one()``, once all ranks run a pass of this kind."""
        gradient = torch.is_grad_enabled()
        while not self._idles and self._agreed(gradient) != gradient:
            self._accompany(idle, False)
        result: T = self._root(one)
        return result

    def finish(self, idle: Idle) -> None:
        """Accompany the passes of the other ranks until none is left."""
        while (gradient := self._agreed(None)) is not None:
            self._accompany(idle, gradient)

    def _agreed(self, gradient: bool | None) -> bool | None:
        wanted = torch.zeros(2, device=self._device)
        if gradient is not None:
            wanted[int(gradient)] = 1
        self._add(wanted)
        without, with_gradient = wanted.tolist()
        return None if not without + with_gradient else not without

    def _accompany(self, idle: Idle, gradient: bool) -> None:
        self._idles = True
        try:
            idle(gradient)
        finally:
            self._idles = False


def passes_of(model: nn.Module) -> Passes:
    """The passes of a model, which is sharded or not."""
    found: Passes = vars(model).get(LOCKSTEP) or OwnPasses()
    return found
