"""Prefix trees of models whose layers carry a state, such as linear attention or Mamba 2.

Such a layer reads its past from a state and not from keys. The state after a shared prefix is kept
where the tree branches, with its graph, and each branch continues it. An inner node is one pass of
the backbone, and so are neighbouring leaves of one parent, as a batch. Shared text is forwarded
once, and the gradient flows back through the states. Calls run in groups of at most ``max_tokens``
unique tokens; a prefix that two groups share is forwarded in both.

The states go through transformers' interface of caches. :class:`BranchState` never writes to a
tensor, as a cache for generation does: branches share their prefix's tensors. For the same reason
no pass continues a state by one token: Mamba 2 then takes its step for generation, which writes to
the state and does not clamp the time step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from babylon.training.grpo.prefix_tree import PrefixTree
from babylon.training.grpo.tree_forward import (
    Head,
    Loss,
    TreeValues,
    Values,
    backward,
    flat_places,
    token_values,
)

# types of models whose layers hand their states on with a gradient; Mamba 1 (Jamba) starts each
# scan from zero, whatever state it is given
STATEFUL = {
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "zamba2",
}


class BranchState:
    """Keys, values and states of all layers after a prefix of ``seen`` tokens."""

    is_compileable = False

    def __init__(
        self, parent: "BranchState | None" = None, seen: int = 0, branches: int = 1
    ) -> None:
        self.seen = seen
        self.branches = branches
        self._keys: dict[int, tuple[Tensor, Tensor]] = dict(parent._keys) if parent else {}
        self._states: dict[tuple[str, int, int], Tensor] = dict(parent._states) if parent else {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Number of keys, and the position of the first one."""
        return self.seen + query_length, 0

    def is_recording_past(self, layer_idx: int) -> bool:
        """True, because layers that may forget the past write to their states."""
        return True

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values ``[B, G, n, d]`` of B branches, and return all of them."""
        if (past := self._keys.get(layer_idx)) is not None:
            keys = torch.cat([self._branched(past[0]), keys], 2)
            values = torch.cat([self._branched(past[1]), values], 2)
        self._keys[layer_idx] = keys, values
        return keys, values

    def has_previous_state(self, layer_idx: int | None = None) -> bool:
        """True if some layer has a state, or this one."""
        return any(layer_idx in (None, layer) for _, layer, _ in self._states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs ``[B, c, k]`` of a convolution."""
        return self._state("conv", layer_idx, state_idx)

    def update_conv_state(
        self, inputs: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        """Return the inputs ``[B, c, n]`` after those that the convolution still sees."""
        past = self.get_conv_state(layer_idx, state_idx)
        inputs = inputs if past is None else torch.cat([past, inputs], -1)
        self._states["conv", layer_idx, state_idx] = inputs[..., -conv_kernel_size:]
        return inputs

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The sum ``[B, ...]`` that a layer carries on."""
        return self._state("recurrent", layer_idx, state_idx)

    def update_recurrent_state(
        self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        self._states["recurrent", layer_idx, state_idx] = state
        return state

    def _state(self, kind: str, layer: int, number: int) -> Tensor | None:
        state = self._states.get((kind, layer, number))
        return None if state is None else self._branched(state)

    def _branched(self, state: Tensor) -> Tensor:
        return state.expand(self.branches, *state.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class StatefulForward:
    """A model with states as backbone and head. The methods are those of ``TreeForward``."""

    backbone: PreTrainedModel
    head: Head
    vocabulary: int
    max_tokens: int
    entropy_gradient: bool = False

    def logprobs(self, tree: PrefixTree) -> TreeValues:
        """Values of all calls, without gradient."""
        weight = next(self.backbone.parameters())
        dtype = torch.promote_types(weight.dtype, torch.float32)
        values = torch.zeros(2, int(tree.offsets[-1]), dtype=dtype, device=weight.device)
        with torch.no_grad():
            for calls in self._groups(tree):
                places = torch.from_numpy(flat_places(tree.offsets, calls)).to(weight.device)
                values[:, places] = torch.stack(self._forward(tree.only(calls)))
        return TreeValues(logprobs=values[0], entropy=values[1])

    def accumulate(self, tree: PrefixTree, loss: Loss) -> None:
        """Add the gradient of ``loss`` over all calls to the parameters' ``.grad``."""
        for calls in self._groups(tree):
            lengths = [len(tree.calls[call].completion) for call in calls]
            columns = [
                pad_sequence(list(torch.split(column, lengths)), batch_first=True)
                for column in self._forward(tree.only(calls))
            ]
            backward(loss(calls, Values(logprobs=columns[0], entropy=columns[1])))

    def _groups(self, tree: PrefixTree) -> Iterator[list[int]]:
        """Neighbours of the tree with at most ``max_tokens`` unique tokens, or one call."""
        group: list[int] = []
        tokens = 0
        for call, common in zip(tree.order.tolist(), tree.common.tolist(), strict=True):
            length = len(tree.ids[call]) - 1
            if group and tokens + length - common > self.max_tokens:
                yield group
                group, tokens = [], 0
            tokens += length - common if group else length
            group.append(call)
        yield group

    def _forward(self, tree: PrefixTree) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies ``[N]`` of all completion tokens, call by call."""
        hidden = self._hidden(tree)
        rows, targets, temperatures = [], [], []
        for call, tokens in enumerate(tree.ids):
            first = len(tree.calls[call].prompt) - 1
            rows += _between(tree, hidden, tree.node_of_call[call], first, len(tokens) - 1)
            targets.append(torch.from_numpy(tokens[first + 1 :]))
            temperatures.append(torch.full((len(targets[-1]),), tree.calls[call].temperature))
        given = torch.cat(rows)
        logprobs, entropy = token_values(
            self.head,
            self.vocabulary,
            given,
            torch.cat(temperatures).to(given.device),
            torch.arange(len(given), device=given.device),
            torch.cat(targets).to(given.device),
        )
        return logprobs, entropy if self.entropy_gradient else entropy.detach()

    def _hidden(self, tree: PrefixTree) -> list[Tensor]:
        """Last hidden states ``[n, h]`` of each node."""
        states: dict[int, BranchState] = {}
        found: dict[int, Tensor] = {}
        waiting: set[int] = set()  # nodes of one token, which run as the first one of each child
        for run in _runs(tree):
            first = tree.nodes[run[0]]
            early = tree.nodes[first.parent].tokens if first.parent in waiting else first.tokens[:0]
            tokens = [np.concatenate([early, tree.nodes[index].tokens]) for index in run]
            seen = first.start - len(early)
            states = {at: one for at, one in states.items() if tree.nodes[at].last > run[0]}
            inner = first.last > run[0] + 1
            if inner and seen and len(tokens[0]) == 1:
                waiting.add(run[0])
                states[run[0]] = states[first.parent]
                continue
            state = BranchState(states.get(first.parent), seen, len(run))
            hidden = self._pass(tokens, state)
            if len(early):
                found.setdefault(first.parent, hidden[0, :1])
            for index, row, of in zip(run, hidden, tokens, strict=True):
                found[index] = row[len(early) : len(of)]
            if inner:
                states[run[0]] = state
        return [found[index] for index in range(len(tree.nodes))]

    def _pass(self, tokens: Sequence[NDArray[np.int64]], state: BranchState) -> Tensor:
        """Last hidden states ``[B, n, h]`` of B branches of a state, padded to the longest.

        Only leaves are padded: no later token sees their ends. One token after a state is, too.
        """
        device, longest = next(self.backbone.parameters()).device, max(map(len, tokens))
        ids = np.zeros((len(tokens), max(longest, 2) if state.seen else longest), dtype=np.int64)
        for row, of in zip(ids, tokens, strict=True):
            row[: len(of)] = of
        backbone: Callable[..., Any] = self.backbone
        with _short_chunks(self.backbone, ids.shape[1]):
            output = backbone(
                input_ids=torch.from_numpy(ids).to(device),
                position_ids=torch.arange(ids.shape[1], device=device)[None] + state.seen,
                past_key_values=state,
                use_cache=True,
            )
        hidden: Tensor = output.last_hidden_state
        return hidden


def _runs(tree: PrefixTree) -> Iterator[list[int]]:
    """Nodes of one pass: an inner node, or neighbouring leaves padded to twice their tokens."""
    run: list[int] = []
    for index, node in enumerate(tree.nodes):
        lengths = [len(tree.nodes[at].tokens) for at in (*run, index)]
        alike = run and tree.nodes[run[0]].parent == node.parent and node.last == index + 1
        if run and not (alike and max(lengths) * len(lengths) <= 2 * sum(lengths)):
            yield run
            run = []
        run.append(index)
        if node.last > index + 1:
            yield run
            run = []
    if run:
        yield run


@contextmanager
def _short_chunks(backbone: nn.Module, tokens: int) -> Iterator[None]:
    """Mamba 2 pads its input to whole chunks. Their length does not change the result."""
    mixers: list[Any] = [m for m in backbone.modules() if hasattr(m, "chunk_size")]
    before: list[int] = [mixer.chunk_size for mixer in mixers]
    for mixer in mixers:
        mixer.chunk_size = min(mixer.chunk_size, 1 << (tokens - 1).bit_length())
    try:
        yield
    finally:
        for mixer, size in zip(mixers, before, strict=True):
            mixer.chunk_size = size


def _between(
    tree: PrefixTree, hidden: Sequence[Tensor], node: int, first: int, stop: int
) -> list[Tensor]:
    """Hidden states of a call's positions ``[first, stop)``, in order; ``node`` holds the last."""
    parts: list[Tensor] = []
    while stop > first:
        start = tree.nodes[node].start
        parts.append(hidden[node][max(first, start) - start : stop - start])
        stop, node = min(stop, start), tree.nodes[node].parent
    return parts[::-1]
