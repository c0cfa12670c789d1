"""Values of a forward pass, the signature of a loss on them, and the backward pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Values of C calls of up to T completion tokens, 0 beyond a call's own length."""

    logprobs: Tensor  # [C, T] fp32, at each call's logged temperature
    entropy: Tensor  # [C, T] fp32, nats, without gradient


Loss = Callable[[Sequence[int], Values], Tensor]  # positions of calls [C], their values → scalar


def backward(loss: Tensor) -> None:
    """Back-propagate with autocast off, in the dtypes of the forward pass."""
    with torch.autocast(loss.device.type, enabled=False):
        loss.backward()  # type: ignore[no-untyped-call]
