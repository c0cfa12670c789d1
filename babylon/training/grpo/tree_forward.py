"""Values and gradients of a prefix tree, portion by portion, with shared prefixes forwarded once.

A portion with children is forwarded for its keys and values. Then its children run, and then the
portion's backward pass, with the gradients of those keys and values from its children (see
:mod:`babylon.training.grpo.portions`). Its activations are kept meanwhile, if ``keep_tokens`` has
room for them and those of the portions above; otherwise it is forwarded again. The loss of a
completion that spans several portions is computed in the portion where it ends. Its earlier tokens
get their gradient in their own portion's backward pass.

The language-model head runs at trained positions only, in chunks of rows. Only rows that predict a
trained token reach it, and each (position, temperature) only once, even if several calls read it.
Statistics over the vocabulary are fp32. If there is more than one chunk, the backward pass
recomputes the logits, so ``[M, V]`` never exists for all M.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from babylon.training.grpo.attention.piecewise import places
from babylon.training.grpo.attention.tree_attention import (
    Attention,
    AttentionRun,
    KeyValueCache,
    tree_attention,
)
from babylon.training.grpo.portions import Portion, cut
from babylon.training.grpo.prefix_tree import PrefixTree
from babylon.training.grpo.router_balance import RouterBalance


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Values of C calls of up to T completion tokens, 0 beyond a call's own length."""

    logprobs: Tensor  # [C, T] fp32, at each call's logged temperature
    entropy: Tensor  # [C, T] fp32, nats, with gradient for an entropy bonus only


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeValues:
    """Values of the N completion tokens of a tree, one call after the other."""

    logprobs: Tensor  # [N] fp32, at each call's logged temperature
    entropy: Tensor  # [N] fp32, nats


Loss = Callable[[Sequence[int], Values], Tensor]  # positions of calls [C], their values → scalar


def flat_places(offsets: NDArray[np.int64], calls: Iterable[int]) -> NDArray[np.int64]:
    """Places of the calls' completion tokens in a table ``[N]``, one call after the other."""
    runs = [np.arange(*offsets[call : call + 2]) for call in calls]
    return np.concatenate([*runs, np.zeros(0, dtype=np.int64)])


def padded_places(offsets: Tensor, calls: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the completion tokens of C calls in a table ``[N]``, and where they are.

    Both ``[C, T]``, T the longest completion. Beyond a call's end, the place is that of its first
    token and the mask is false.
    """
    first, last = offsets[calls], offsets[calls + 1]
    places = first[:, None] + torch.arange(int((last - first).max()), device=offsets.device)
    mask = places < last[:, None]
    return torch.where(mask, places, first[:, None]), mask


def of_similar_length(calls: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """The calls in groups, padded to at most twice their tokens unless they are few."""
    group: list[int] = []
    tokens = 0
    for call in sorted(calls, key=lengths.__getitem__):
        tokens += lengths[call]
        if group and (len(group) + 1) * lengths[call] > max(2 * tokens, _SMALL_TABLE):
            yield group
            group, tokens = [], lengths[call]
        group.append(call)
    if group:
        yield group


def backward(loss: Tensor) -> None:
    """Back-propagate with autocast off, in the dtypes of the forward pass."""
    with torch.autocast(loss.device.type, enabled=False):
        loss.backward()  # type: ignore[no-untyped-call]


Head = Callable[[Tensor], Tensor]
Run = Callable[[Callable[[], Tensor]], Tensor]  # runs one pass
_CHUNK_ELEMENTS = 2**22  # logits of a chunk: 16 MiB of fp32 fit into a CPU cache
_SMALL_TABLE = 2**14  # padded values: less costs less than another call of the loss
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
    run: Run
    keep_tokens: int = 0  # of portions whose descendants run
    entropy_gradient: bool = False
    balance: RouterBalance | None = None

    def logprobs(self, tree: PrefixTree) -> TreeValues:
        """Values of all calls, without gradient."""
        with torch.no_grad(), tree_attention(self.backbone):
            window = _TreePass.cut(self, tree)
            for root in window.roots:
                window.read(root)
        return TreeValues(logprobs=window.values[0], entropy=window.values[1])

    def accumulate(self, tree: PrefixTree, loss: Loss) -> None:
        """Add the gradient of ``loss`` over all calls to the parameters' ``.grad``."""
        with tree_attention(self.backbone):
            window = _TreePass.cut(self, tree)
            if self.balance is not None:
                with torch.no_grad(), self.balance.counted():
                    for root in window.roots:
                        window.read(root)
            for root in window.roots:
                window.train(root, loss, self.keep_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The result of a pass over a portion.

    ``place`` ``[M]`` of the chosen terms, their logprobs and entropies ``values`` ``[2, M]``, and
    the portion's part of the routers' loss.
    """

    place: Tensor
    values: Tensor
    balance: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _TreePass:
    """One pass over all portions of a tree: C calls with N completion tokens."""

    model: TreeForward
    portions: Sequence[Portion]
    roots: Sequence[int]
    ends: NDArray[np.int64]  # [C + 1], the tree's offsets
    lengths: Sequence[int]  # [C]
    temperature: NDArray[np.float64]  # [C]
    offsets: Tensor  # [C + 1], as ends
    values: Tensor  # [2, N], logprobs and entropies of the terms computed so far
    grads: Tensor  # [2, N], of the loss, by terms of portions that still have to run
    caches: dict[int, KeyValueCache] = field(default_factory=dict)

    @classmethod
    def cut(cls, model: TreeForward, tree: PrefixTree) -> "_TreePass":
        portions, roots = cut(tree, model.max_tokens)
        weight = next(model.backbone.parameters())
        dtype = torch.promote_types(weight.dtype, torch.float32)
        values = torch.zeros(2, int(tree.offsets[-1]), dtype=dtype, device=weight.device)
        return cls(
            model=model,
            portions=portions,
            roots=roots,
            ends=tree.offsets,
            lengths=np.diff(tree.offsets).tolist(),
            offsets=torch.from_numpy(tree.offsets).to(weight.device),
            temperature=np.array([call.temperature for call in tree.calls]),
            values=values,
            grads=torch.zeros_like(values),
        )

    def read(self, root: int) -> None:
        """Compute the values of a portion and of its descendants, without gradient."""
        for number, after in self._visits(root):
            if after:
                self.caches.pop(number, None)
            else:
                self._store(number, np.ones(len(self.portions[number].terms.row), bool))

    def train(self, root: int, loss: Loss, room: int) -> None:
        """Back-propagate a portion and its descendants, into parameters and ancestors' caches.

        ``room``: tokens whose activations may be kept while descendants run.
        """
        kept: dict[int, _Found] = {}
        for number, after in self._visits(root):
            portion = self.portions[number]
            if after:
                room += len(portion.tokens) if number in kept else 0
                self._backward(number, loss, kept.pop(number, None))
                self.caches.pop(number, None)
            elif portion.children and len(portion.tokens) <= room:
                room -= len(portion.tokens)
                kept[number] = self._store(number, np.ones_like(portion.terms.final))
            elif portion.children:
                with torch.no_grad():
                    self._store(number, ~portion.terms.final)

    def _visits(self, root: int) -> Iterator[tuple[int, bool]]:
        """Each portion before its descendants (False), and after them (True).

        A long call in small portions is a deeper tree than Python can recurse into.
        """
        waiting = [(root, False)]
        while waiting:
            number, after = waiting.pop()
            if not after:
                waiting.append((number, True))
                waiting += [(child, False) for child in reversed(self.portions[number].children)]
            yield number, after

    def _store(self, number: int, chosen: Chosen) -> "_Found":
        portion = self.portions[number]
        if portion.children:
            self.caches[number] = KeyValueCache()
        found = self._forward(number, chosen)
        self.values[:, found.place] = found.values.detach()
        return found

    def _backward(self, number: int, loss: Loss, kept: "_Found | None") -> None:
        portion = self.portions[number]
        terms = portion.terms
        forwarded = kept or self._forward(number, np.ones_like(terms.final))
        place, found = forwarded.place, forwarded.values
        self.values[1, place] = found[1].detach()
        total = (found * self.grads[:, place]).sum()  # calls that end in a descendant
        calls = np.unique(terms.call[terms.final])
        places, values, known = self._values_of(calls, place, found)
        for group in of_similar_length(calls.tolist(), self.lengths):
            at, mask = padded_places(self.offsets, torch.tensor(group, device=place.device))
            index = torch.searchsorted(places, at)
            taken = Values(
                logprobs=torch.where(mask, values[0, index], 0.0),
                entropy=torch.where(mask, values[1, index], 0.0),
            )
            total = total + loss(group, taken)
        backward(total if forwarded.balance is None else total + forwarded.balance)
        if known.grad is not None:
            self.grads[:, places] = known.grad

    def _values_of(
        self, calls: NDArray[np.int64], place: Tensor, found: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Ascending places ``[n]`` of the calls' tokens, their values, and those known before.

        Values are ``[2, n]``. Those of this portion, at ``place``, have a gradient.
        """
        places = torch.from_numpy(flat_places(self.ends, calls)).to(place.device)
        known = self.values[:, places].requires_grad_()
        ours = torch.isin(place, places)
        index = torch.searchsorted(places, place[ours])
        return places, known.index_copy(1, index, found[:, ours]), known

    def _forward(self, number: int, chosen: Chosen) -> "_Found":
        portion, balance = self.portions[number], self.model.balance
        terms, device = portion.terms, self.values.device
        rows = np.unique(terms.row[chosen]) if chosen.any() else np.zeros(1, dtype=np.int64)
        if balance is not None:  # the last layer's router counts too
            rows = np.arange(len(portion.tokens))
        pairs = np.stack(
            [np.searchsorted(rows, terms.row[chosen]), self.temperature[terms.call[chosen]]]
        )
        unique, index = np.unique(pairs, axis=1, return_inverse=True)
        order = np.argsort(index, kind="stable")  # the head needs ascending rows

        def tensor(values: NDArray[np.int64] | NDArray[np.float64]) -> Tensor:
            return torch.from_numpy(values).to(device)

        attention = AttentionRun(
            layout=portion.layout,
            rows=tensor(rows),
            rows_layout=portion.layout.select(rows),
            attention=self.model.attention,
            ancestors=[
                (self.caches[a.portion], places(a.tokens, device)) for a in portion.ancestors
            ],
            own=self.caches.get(number),
        )
        watched: AbstractContextManager[list[Tensor]] = (
            nullcontext([]) if balance is None else balance.watch()
        )

        def one() -> Tensor:
            output = self.model.backbone(
                input_ids=tensor(portion.tokens)[None],
                position_ids=tensor(portion.positions)[None],
                use_cache=False,
                run=attention,
            )
            logprobs, entropy = token_values(
                self.model.head,
                self.model.vocabulary,
                output.last_hidden_state[0, tensor(unique[0].astype(np.int64))],
                None if (unique[1] == 1).all() else tensor(unique[1]),
                tensor(index[order]),
                tensor(terms.target[chosen][order]),
            )
            if not self.model.entropy_gradient:  # its backward pass costs a pass over the logits
                entropy = entropy.detach()
            return torch.stack([logprobs, entropy])

        with watched as routed:
            values = self.model.run(one)
        extra = None
        if balance is not None and torch.is_grad_enabled():
            extra = balance.loss(routed, tensor(portion.calls))
        elif balance is not None and balance.counting:
            balance.count(routed, tensor(portion.calls))
        return _Found(place=tensor(terms.place[chosen][order]), values=values, balance=extra)


def token_values(
    head: Head,
    vocabulary: int,
    hidden: Tensor,
    temperature: Tensor | None,
    row: Tensor,
    target: Tensor,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of M targets, and entropies of the distributions that predict them.

    Args:
        head: maps ``[R, h]`` to logits ``[R, V]``.
        hidden: ``[R, h]``, the rows that predict a target.
        temperature: ``[R]``, divisor of each row's logits. None: all are 1.
        row: ``[M]`` ascending, the row that predicts each target.
        target: ``[M]``, token ids.

    Returns:
        Log-probabilities and entropies ``[M]``, fp32, in nats.
    """
    rows = max(_MIN_ROWS, _CHUNK_ELEMENTS // vocabulary)

    def chunk(
        hidden: Tensor, temperature: Tensor | None, row: Tensor, target: Tensor
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
        divisor = None if temperature is None else temperature[at]
        inputs = hidden[at], divisor, row[first:last] - start, target[first:last]
        parts.append(checkpoint(chunk, *inputs, use_reentrant=False, preserve_rng_state=False))
    logprobs, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, entropy


class _Context(FunctionCtx):
    dtype: torch.dtype
    saved_tensors: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]


class _Statistics(torch.autograd.Function):
    """``log_softmax(logits / temperature)[row, target]`` and entropy, in few memory passes."""

    @staticmethod
    def forward(
        ctx: _Context, logits: Tensor, temperature: Tensor | None, row: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if temperature is not None:
            scaled = scaled / temperature.to(scaled.dtype)[:, None]
        # one pass that stays in the cache; p of the likeliest token, 1/V or more, gives the total
        p = torch.softmax(scaled, -1)
        normaliser = scaled.amax(-1) - p.amax(-1).log()
        logprobs = scaled[row, target] - normaliser[row]
        entropy = normaliser - torch.linalg.vecdot(p, scaled)
        ctx.save_for_backward(p, temperature, row, target, entropy)  # type: ignore[arg-type]
        ctx.dtype = logits.dtype
        ctx.set_materialize_grads(False)
        return logprobs, entropy[row]

    @staticmethod
    def backward(
        ctx: _Context, grad: Tensor | None, entropy_grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        p, temperature, row, target, entropy = ctx.saved_tensors
        divisor = torch.ones_like(entropy) if temperature is None else temperature.to(p.dtype)
        nothing, parts = torch.zeros_like(entropy), list[Tensor]()
        if grad is not None:
            mass = nothing.index_add(0, row, grad) / divisor
            parts.append(p * -mass[:, None])
            parts[0].index_put_((row, target), grad / divisor[row], accumulate=True)
        if entropy_grad is not None:  # dH / dz = -p (log p + H) / temperature
            mass = nothing.index_add(0, row, entropy_grad) / divisor
            parts.append((torch.xlogy(p, p) + p * entropy[:, None]) * -mass[:, None])
        d_logits = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        return d_logits.to(ctx.dtype), None, None, None
