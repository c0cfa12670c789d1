"""Values and gradients of a prefix tree, portion by portion, each shared prefix forwarded once.

A portion with children is forwarded for its keys and values, then its children are run, then the
portion itself is run again with the gradient that they left for those (module
:mod:`babylon.training.grpo.portions`). A completion that reaches across portions is read where it
ends; the log-probabilities of its earlier tokens get their gradient when their own portion is run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from babylon.training.grpo.attention.tree_attention import Kernel, Memory, Run, tree_attention
from babylon.training.grpo.lm_head import token_values
from babylon.training.grpo.portions import Portion, cut
from babylon.training.grpo.prefix_tree import PrefixTree
from babylon.training.grpo.forward_values import Loss, Values, backward

Chosen = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class TreeForward:
    """A model without its head, its head, and how it attends."""

    backbone: Any
    head: Any
    vocabulary: int
    kernel: Kernel
    max_tokens: int

    def logprobs(self, tree: PrefixTree) -> Values:
        with torch.no_grad(), tree_attention(self.backbone):
            window = _TreePass.cut(self, tree)
            for root in window.roots:
                window.read(root)
        return Values(logprobs=window.logprobs, entropy=window.entropy)

    def accumulate(self, tree: PrefixTree, loss: Loss) -> None:
        with tree_attention(self.backbone):
            window = _TreePass.cut(self, tree)
            for root in window.roots:
                window.train(root, loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TreePass:
    model: TreeForward
    portions: Sequence[Portion]
    roots: Sequence[int]
    lengths: Sequence[int]  # [C]
    temperature: np.ndarray[Any, np.dtype[np.float64]]  # [C]
    logprobs: Tensor  # [C, T], of the terms read so far
    entropy: Tensor  # [C, T]
    grads: Tensor  # [C, T], of the loss by terms that belong to an earlier portion
    memories: dict[int, Memory] = field(default_factory=dict)

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
        """Fill in the values of a portion and its descendants, without gradient."""
        portion = self.portions[number]
        self._store(number, np.ones(len(portion.terms.row), bool))
        for child in portion.children:
            self.read(child)
        self.memories.pop(number, None)

    def train(self, number: int, loss: Loss) -> None:
        """Back-propagate a portion and its descendants, leaving gradients to its ancestors."""
        portion = self.portions[number]
        if portion.children:
            with torch.no_grad():
                self._store(number, ~portion.terms.final)
            for child in portion.children:
                self.train(child, loss)
        self._backward(number, loss)
        self.memories.pop(number, None)

    def _store(self, number: int, chosen: Chosen) -> None:
        portion = self.portions[number]
        memory = self.memories[number] = Memory()
        place, logprobs, entropy = self._forward(
            portion, chosen, capture=memory if portion.children else None
        )
        self.logprobs[place], self.entropy[place] = logprobs, entropy

    def _backward(self, number: int, loss: Loss) -> None:
        portion = self.portions[number]
        terms, inject = portion.terms, self.memories.get(number)
        place, logprobs, entropy = self._forward(portion, np.ones_like(terms.final), inject=inject)
        self.entropy[place] = entropy
        total = (logprobs * self.grads[place]).sum()  # of calls that ended in a descendant
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
        capture: Memory | None = None,
        inject: Memory | None = None,
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        """(call, step), log-probability and entropy, ``[M]`` each, of the chosen terms."""
        terms, device = portion.terms, self.logprobs.device
        rows = np.unique(terms.row[chosen]) if chosen.any() else np.zeros(1, dtype=np.int64)
        pairs = np.stack(
            [np.searchsorted(rows, terms.row[chosen]), self.temperature[terms.call[chosen]]]
        )
        unique, index = np.unique(pairs, axis=1, return_inverse=True)
        order = np.argsort(index, kind="stable")  # the head wants its rows ascending

        def tensor(values: Any) -> Tensor:
            return torch.from_numpy(values).to(device)

        run = Run(
            layout=portion.layout,
            rows=tensor(rows),
            rows_layout=portion.layout.select(rows),
            kernel=self.model.kernel,
            ancestors=[
                (self.memories[a.portion], slice(a.start, a.end)) for a in portion.ancestors
            ],
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
