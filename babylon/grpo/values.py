"""What a forward pass gives, and the loss that is taken of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Of C calls, T the longest completion among them; 0 beyond a call's own length."""

    logprobs: Tensor  # [C, T] fp32, at each call's logged temperature
    entropy: Tensor  # [C, T] fp32, nats, without gradient


Loss = Callable[[Sequence[int], Values], Tensor]
