"""Log-probabilities of logged completions and their gradient: the one interface to the model.

Three paths give the same numbers. ``packed`` and ``depth_first`` forward every shared prefix
once; ``plain`` pads calls into batches, for models whose attention is not standard.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from babylon.grpo.plain import plain_values
from babylon.grpo.tree import PrefixTree

Path = Literal["packed", "depth_first", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Of C calls with up to T completion tokens, 0 beyond a call's own length."""

    logprobs: Tensor  # [C, T] fp32, at each call's logged temperature
    entropy: Tensor  # [C, T] fp32, nats, without gradient


Loss = Callable[[Sequence[int], Values], Tensor]


class PolicyForward:
    """A policy under training, seen as a function from calls to log-probabilities.

    Args:
        model: a causal LM of transformers, or a peft model around one, in ``eval()`` mode:
            dropout would make one token's log-probability differ between passes.
        max_tokens: input tokens whose activations are alive at once. Out of memory, make another
            with fewer: nothing is kept between calls but gradients.
        path: None takes the fastest that fits the model and its device.
    """

    def __init__(self, model: Any, *, max_tokens: int = 8192, path: Path | None = None) -> None:
        self.model = model
        self.max_tokens = max_tokens
        self.path: Path = path or "plain"

    def logprobs(self, tree: PrefixTree) -> Values:
        """Values of all calls, without gradient."""
        longest = max(len(call.completion) for call in tree.calls)
        device = next(self.model.parameters()).device
        logprobs, entropy = torch.zeros(2, len(tree.calls), longest, device=device)
        with torch.no_grad():
            for calls, values in self._plain(tree):
                width = values.logprobs.shape[1]
                logprobs[calls, :width] = values.logprobs
                entropy[calls, :width] = values.entropy
        return Values(logprobs=logprobs, entropy=entropy)

    def accumulate(self, tree: PrefixTree, loss: Loss) -> None:
        """Add the gradient of ``loss`` over all calls to the parameters' ``.grad``.

        ``loss(calls, values)`` is called with disjoint sets of calls, positions in ``tree.calls``,
        that together are all of them; it returns a scalar, and the scalars add up. What it divides
        by must therefore not depend on the calls it is given.
        """
        for calls, values in self._plain(tree):
            loss(calls, values).backward()  # type: ignore[no-untyped-call]

    def _plain(self, tree: PrefixTree) -> Iterator[tuple[list[int], Values]]:
        for calls in _similar_lengths(tree, self.max_tokens):
            logprobs, entropy = plain_values(self.model, [tree.calls[c] for c in calls])
            yield calls, Values(logprobs=logprobs, entropy=entropy)


def _similar_lengths(tree: PrefixTree, max_tokens: int) -> Iterator[list[int]]:
    """Calls of similar length together, at most ``max_tokens`` padded tokens a batch."""
    portion: list[int] = []
    for call in sorted(range(len(tree.calls)), key=lambda c: len(tree.ids[c]), reverse=True):
        widest = len(tree.ids[portion[0]]) if portion else 0
        if portion and widest * (len(portion) + 1) > max_tokens:
            yield portion
            portion = []
        portion.append(call)
    if portion:
        yield portion
