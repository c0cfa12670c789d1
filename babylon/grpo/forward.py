"""Log-probabilities of logged completions and their gradient: the one interface to the model.

Three paths give the same numbers. ``packed`` and ``depth_first`` forward every shared prefix
once; ``plain`` pads calls into batches, for models whose attention is not standard.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch

from babylon.grpo.attention.nodewise import nodewise_attention
from babylon.grpo.plain import plain_values
from babylon.grpo.shared import SharedForward
from babylon.grpo.tree import PrefixTree
from babylon.grpo.values import Loss, Values

__all__ = ["Loss", "Path", "PolicyForward", "Values"]

Path = Literal["packed", "depth_first", "plain"]


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
        causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._shared = SharedForward(
            backbone=causal_lm.base_model,
            head=causal_lm.get_output_embeddings(),
            vocabulary=causal_lm.config.vocab_size,
            kernel=nodewise_attention,
            max_tokens=max_tokens,
        )

    def logprobs(self, tree: PrefixTree) -> Values:
        """Values of all calls, without gradient."""
        if self.path != "plain":
            return self._shared.logprobs(tree)
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
        if self.path != "plain":
            self._shared.accumulate(tree, loss)
            return
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
