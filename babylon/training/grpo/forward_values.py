"""What a forward pass gives, the loss that is taken of it, and the way back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Of C calls, T the longest completion among them; 0 beyond a call's own length."""

    logprobs: Tensor  # [C, T] fp32, at each call's logged temperature
    entropy: Tensor  # [C, T] fp32, nats, without gradient


Loss = Callable[[Sequence[int], Values], Tensor]


def backward(loss: Tensor) -> None:
    """Back-propagate in the types of the forward pass, which autocast would change once more."""
    with torch.autocast(loss.device.type, enabled=False):
        loss.backward()  # type: ignore[no-untyped-call]
