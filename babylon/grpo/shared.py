"""Values and gradients of a prefix tree, portion by portion, each shared prefix forwarded once.

A portion with children is forwarded for its keys and values, then its children are run, then the
portion itself is run again with the gradient that they left for those (module
:mod:`babylon.grpo.portions`). A completion that reaches across portions is read where it ends;
the log-probabilities of its earlier tokens get their gradient when their own portion is run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from babylon.grpo.attention.interface import Kernel, Memory, Run, tree_attention
from babylon.grpo.head import token_values
from babylon.grpo.portions import Portion, cut
from babylon.grpo.tree import PrefixTree
from babylon.grpo.values import Loss, Values


@dataclass(frozen=True, slots=True)
class SharedForward:
    """A model without its head, its head, and how it attends."""

    backbone: Any
    head: Any
    vocabulary: int
    kernel: Kernel
    max_tokens: int

    def logprobs(self, tree: PrefixTree) -> Values:
        with torch.no_grad(), tree_attention(self.backbone):
            window = _Window.cut(self, tree)
            for root in window.roots:
                window.read(root)
        return Values(logprobs=window.logprobs, entropy=window.entropy)

    def accumulate(self, tree: PrefixTree, loss: Loss) -> None:
        with tree_attention(self.backbone):
            window = _Window.cut(self, tree)
            for root in window.roots:
                window.train(root, loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    model: SharedForward
    portions: Sequence[Portion]
    roots: Sequence[int]
    lengths: Tensor  # [C], on CPU
    temperature: np.ndarray[Any, np.dtype[np.float64]]  # [C]
    logprobs: Tensor  # [C, T], of the terms read so far
    entropy: Tensor  # [C, T]
    grads: Tensor  # [C, T], of the loss by terms that belong to an earlier portion
    memories: dict[int, Memory] = field(default_factory=dict)

    @classmethod
    def cut(cls, model: SharedForward, tree: PrefixTree) -> "_Window":
        portions, roots = cut(tree, model.max_tokens)
        weight = next(model.backbone.parameters())
        lengths = torch.tensor([len(call.completion) for call in tree.calls])
        shape = (len(tree.calls), int(lengths.max()))
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
        hidden = self._forward(number, capture=bool(portion.children))
        self._store(portion, hidden, np.ones(len(portion.terms.row), dtype=bool))
        for child in portion.children:
            self.read(child)
        self.memories.pop(number, None)

    def train(self, number: int, loss: Loss) -> None:
        """Back-propagate a portion and its descendants, leaving gradients to its ancestors."""
        portion = self.portions[number]
        if portion.children:
            with torch.no_grad():
                hidden = self._forward(number, capture=True)
                self._store(portion, hidden, ~portion.terms.final)
            del hidden
            for child in portion.children:
                self.train(child, loss)
        hidden = self._forward(number, inject=self.memories.get(number))
        self._backward(portion, hidden, loss)
        self.memories.pop(number, None)

    def _forward(
        self, number: int, *, capture: bool = False, inject: Memory | None = None
    ) -> Tensor:
        """Hidden states ``[N, h]`` after the final norm."""
        portion = self.portions[number]
        if capture:
            self.memories[number] = Memory()
        run = Run(
            layout=portion.layout,
            kernel=self.model.kernel,
            ancestors=[(self.memories[a.portion], slice(a.start, a.end)) for a in portion.ancestors],
            capture=self.memories[number] if capture else None,
            inject=inject,
        )
        device = self.logprobs.device
        output = self.model.backbone(
            input_ids=torch.from_numpy(portion.tokens).to(device)[None],
            position_ids=torch.from_numpy(portion.positions).to(device)[None],
            use_cache=False,
            run=run,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _store(self, portion: Portion, hidden: Tensor, chosen: np.ndarray[Any, Any]) -> None:
        if chosen.any():
            place, logprobs, entropy = self._values(portion, hidden, chosen)
            self.logprobs[place], self.entropy[place] = logprobs, entropy

    def _backward(self, portion: Portion, hidden: Tensor, loss: Loss) -> None:
        terms = portion.terms
        if not len(terms.row):  # no loss of its own: only what the descendants left
            hidden.backward(torch.zeros_like(hidden))  # type: ignore[no-untyped-call]
            return
        place, logprobs, entropy = self._values(portion, hidden, np.ones(len(terms.row), bool))
        total = (logprobs * self.grads[place]).sum()  # of calls that ended in a descendant
        calls = torch.from_numpy(np.unique(terms.call[terms.final])).to(hidden.device)
        known = self.logprobs[calls].requires_grad_()
        if len(calls):
            self.entropy[place] = entropy
            ours = torch.isin(place[0], calls)
            rows = torch.searchsorted(calls, place[0][ours])
            values = known.index_put((rows, place[1][ours]), logprobs[ours])
            width = int(self.lengths[calls.cpu()].max())
            taken = Values(logprobs=values[:, :width], entropy=self.entropy[calls, :width])
            total = total + loss(calls.tolist(), taken)
        total.backward()  # type: ignore[no-untyped-call]
        if known.grad is not None:
            self.grads[calls] = known.grad

    def _values(
        self, portion: Portion, hidden: Tensor, chosen: np.ndarray[Any, Any]
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        """(call, step) ``[M]`` each, log-probability and entropy ``[M]`` of the chosen terms."""
        terms, device = portion.terms, hidden.device
        pairs = np.stack([terms.row[chosen], self.temperature[terms.call[chosen]]])
        unique, index = np.unique(pairs, axis=1, return_inverse=True)
        order = np.argsort(index, kind="stable")  # the head wants its rows ascending
        call, step, target = (t[chosen][order] for t in (terms.call, terms.step, terms.target))
        logprobs, entropy = token_values(
            self.model.head,
            self.model.vocabulary,
            hidden[torch.from_numpy(unique[0].astype(np.int64)).to(device)],
            torch.from_numpy(unique[1]).to(device),
            torch.from_numpy(index[order]).to(device),
            torch.from_numpy(target).to(device),
        )
        place = torch.from_numpy(call).to(device), torch.from_numpy(step).to(device)
        return place, logprobs, entropy
