"""Values and gradients of a prefix tree, portion by portion, with shared prefixes forwarded once.

A portion with children is forwarded for its keys and values. Then its children run, and then the
portion runs again, with the gradients of those keys and values from its children (see
:mod:`babylon.training.grpo.portions`). The loss of a completion that spans several portions is
computed in the portion where it ends. Its earlier tokens get their gradient when their own portion
runs again.

The language-model head runs at trained positions only, in chunks of rows. Only rows that predict a
trained token reach it, and each (position, temperature) only once, even if several calls read it.
Statistics over the vocabulary are fp32. If there is more than one chunk, the backward pass
recomputes the logits, so ``[M, V]`` never exists for all M.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from babylon.training.grpo.attention.tree_attention import (
    Attention,
    AttentionRun,
    KeyValueCache,
    tree_attention,
)
from babylon.training.grpo.portions import Portion, cut
from babylon.training.grpo.prefix_tree import PrefixTree


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


Head = Callable[[Tensor], Tensor]
_CHUNK_ELEMENTS = 2**22  # logits of a chunk: 16 MiB of fp32 fit into a CPU cache
_MIN_ROWS = 256  # with fewer rows, reading the weights takes longer than the products
Chosen = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TreeForward:
    """A model as backbone and head, with its attention and the size of portions."""

    backbone: PreTrainedModel
    head: Head
    vocabulary: int
    attention: Attention
    max_tokens: int

    def logprobs(self, tree: PrefixTree) -> Values:
        """Values of all calls, without gradient."""
        with torch.no_grad(), tree_attention(self.backbone):
            window = _TreePass.cut(self, tree)
            for root in window.roots:
                window.read(root)
        return Values(logprobs=window.logprobs, entropy=window.entropy)

    def accumulate(self, tree: PrefixTree, loss: Loss) -> None:
        """Add the gradient of ``loss`` over all calls to the parameters' ``.grad``."""
        with tree_attention(self.backbone):
            window = _TreePass.cut(self, tree)
            for root in window.roots:
                window.train(root, loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TreePass:
    """One pass over all portions of a tree: C calls of up to T completion tokens."""

    model: TreeForward
    portions: Sequence[Portion]
    roots: Sequence[int]
    lengths: Sequence[int]  # [C]
    temperature: NDArray[np.float64]  # [C]
    logprobs: Tensor  # [C, T], of the terms computed so far
    entropy: Tensor  # [C, T]
    grads: Tensor  # [C, T], of the loss, by terms of portions that still have to run
    caches: dict[int, KeyValueCache] = field(default_factory=dict)

    @classmethod
    def cut(cls, model: TreeForward, tree: PrefixTree) -> "_TreePass":
        portions, roots = cut(tree, model.max_tokens)
        weight = next(model.backbone.parameters())
        lengths = [len(call.completion) for call in tree.calls]
        shape = len(lengths), max(lengths)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        table = [torch.zeros(shape, dtype=dtype, device=weight.device) for _ in range(3)]
        return cls(
            model=model,
            portions=portions,
            roots=roots,
            lengths=lengths,
            temperature=np.array([call.temperature for call in tree.calls]),
            logprobs=table[0],
            entropy=table[1],
            grads=table[2],
        )

    def read(self, number: int) -> None:
        """Compute the values of a portion and of its descendants, without gradient."""
        portion = self.portions[number]
        self._store(number, np.ones(len(portion.terms.row), bool))
        for child in portion.children:
            self.read(child)
        self.caches.pop(number, None)

    def train(self, number: int, loss: Loss) -> None:
        """Back-propagate a portion and its descendants, into parameters and ancestors' caches."""
        portion = self.portions[number]
        if portion.children:
            with torch.no_grad():
                self._store(number, ~portion.terms.final)
            for child in portion.children:
                self.train(child, loss)
        self._backward(number, loss)
        self.caches.pop(number, None)

    def _store(self, number: int, chosen: Chosen) -> None:
        portion = self.portions[number]
        cache = self.caches[number] = KeyValueCache()
        place, logprobs, entropy = self._forward(
            portion, chosen, capture=cache if portion.children else None
        )
        self.logprobs[place], self.entropy[place] = logprobs, entropy

    def _backward(self, number: int, loss: Loss) -> None:
        portion = self.portions[number]
        terms, inject = portion.terms, self.caches.get(number)
        place, logprobs, entropy = self._forward(portion, np.ones_like(terms.final), inject=inject)
        self.entropy[place] = entropy
        total = (logprobs * self.grads[place]).sum()  # calls that end in a descendant
        calls = np.unique(terms.call[terms.final]).tolist()
        known = self.logprobs[calls].requires_grad_()
        if calls:
            ours = torch.isin(place[0], torch.tensor(calls, device=place[0].device))
            rows = torch.searchsorted(torch.tensor(calls, device=place[0].device), place[0][ours])
            values = known.index_put((rows, place[1][ours]), logprobs[ours])
            width = max(self.lengths[call] for call in calls)
            taken = Values(logprobs=values[:, :width], entropy=self.entropy[calls, :width])
            total = total + loss(calls, taken)
        backward(total)
        if known.grad is not None:
            self.grads[calls] = known.grad

    def _forward(
        self,
        portion: Portion,
        chosen: Chosen,
        *,
        capture: KeyValueCache | None = None,
        inject: KeyValueCache | None = None,
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        """((call, step), log-probability, entropy) of the chosen terms, ``[M]`` each."""
        terms, device = portion.terms, self.logprobs.device
        rows = np.unique(terms.row[chosen]) if chosen.any() else np.zeros(1, dtype=np.int64)
        pairs = np.stack(
            [np.searchsorted(rows, terms.row[chosen]), self.temperature[terms.call[chosen]]]
        )
        unique, index = np.unique(pairs, axis=1, return_inverse=True)
        order = np.argsort(index, kind="stable")  # the head needs ascending rows

        def tensor(values: NDArray[np.int64] | NDArray[np.float64]) -> Tensor:
            return torch.from_numpy(values).to(device)

        run = AttentionRun(
            layout=portion.layout,
            rows=tensor(rows),
            rows_layout=portion.layout.select(rows),
            attention=self.model.attention,
            ancestors=[(self.caches[a.portion], slice(a.start, a.end)) for a in portion.ancestors],
            capture=capture,
            inject=inject,
        )
        output = self.model.backbone(
            input_ids=tensor(portion.tokens)[None],
            position_ids=tensor(portion.positions)[None],
            use_cache=False,
            run=run,
        )
        logprobs, entropy = token_values(
            self.model.head,
            self.model.vocabulary,
            output.last_hidden_state[0, tensor(unique[0].astype(np.int64))],
            tensor(unique[1]),
            tensor(index[order]),
            tensor(terms.target[chosen][order]),
        )
        place = tensor(terms.call[chosen][order]), tensor(terms.step[chosen][order])
        return place, logprobs, entropy


def token_values(
    head: Head, vocabulary: int, hidden: Tensor, temperature: Tensor, row: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of M targets, and entropies of the distributions that predict them.

    Args:
        head: maps ``[R, h]`` to logits ``[R, V]``.
        hidden: ``[R, h]``, the rows that predict a target.
        temperature: ``[R]``, divisor of each row's logits.
        row: ``[M]`` ascending, the row that predicts each target.
        target: ``[M]``, token ids.

    Returns:
        Log-probabilities ``[M]`` with gradient and entropies ``[M]`` without, fp32, in nats.
    """
    rows = max(_MIN_ROWS, _CHUNK_ELEMENTS // vocabulary)

    def chunk(
        hidden: Tensor, temperature: Tensor, row: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        # no autocast: rounding a logit to bf16 changes it more than a small update does
        with torch.autocast(hidden.device.type, enabled=False):
            result: tuple[Tensor, Tensor] = _Statistics.apply(  # type: ignore[no-untyped-call]
                head(hidden), temperature, row, target
            )
        return result

    if len(hidden) <= rows:
        return chunk(hidden, temperature, row, target)
    bounds = torch.arange(0, len(hidden) + rows, rows, device=row.device)
    edges = torch.searchsorted(row, bounds).tolist()
    parts = []
    for start, first, last in zip(bounds.tolist(), edges, edges[1:], strict=False):
        at = slice(start, start + rows)
        inputs = hidden[at], temperature[at], row[first:last] - start, target[first:last]
        parts.append(checkpoint(chunk, *inputs, use_reentrant=False, preserve_rng_state=False))
    logprobs, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, entropy


class _Context(FunctionCtx):
    dtype: torch.dtype
    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class _Statistics(torch.autograd.Function):
    """``log_softmax(logits / temperature)[row, target]`` and entropy, in few memory passes."""

    @staticmethod
    def forward(
        ctx: _Context, logits: Tensor, temperature: Tensor, row: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scaled = scaled / temperature.to(scaled.dtype)[:, None]
        highest = scaled.amax(-1)
        weights = (scaled - highest[:, None]).exp_()
        total = weights.sum(-1)
        normaliser = highest + total.log()
        logprobs = scaled[row, target] - normaliser[row]
        mean = torch.bmm(weights[:, None, :], scaled[:, :, None])[:, 0, 0] / total
        entropy = (normaliser - mean)[row]
        ctx.save_for_backward(weights, total, temperature, row, target)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: _Context, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        weights, total, temperature, row, target = ctx.saved_tensors
        mass = torch.zeros_like(total).index_add_(0, row, grad)
        temperature = temperature.to(total.dtype)
        d_logits = weights * (-mass / (total * temperature))[:, None]
        d_logits.index_put_((row, target), grad / temperature[row], accumulate=True)
        return d_logits.to(ctx.dtype), None, None, None
