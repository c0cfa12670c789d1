"""Our attention inside any model of transformers that calls attention through its registry.

The model is called as ever, with ``tree_attention`` as its attention and a :class:`Run` that says
which tokens see which; transformers hands both down to every layer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from babylon.training.grpo.attention.layout import Layout

NAME = "prefix_tree"
Kernel = Callable[[Tensor, Tensor, Tensor, Layout, float], Tensor]
Pair = tuple[Tensor, Tensor]  # keys and values, [1, G, n, d]


@dataclass(slots=True)
class Memory:
    """Keys and values of a portion by layer, and the gradient that descendants add to them."""

    pairs: dict[int, Pair] = field(default_factory=dict)
    grads: dict[int, Pair] = field(default_factory=dict)

    def add(self, layer: int, part: int, at: slice, grad: Tensor) -> None:
        if layer not in self.grads:
            key, value = self.pairs[layer]  # many descendants add up: in fp32 at least
            wide = torch.promote_types(key.dtype, torch.float32)
            self.grads[layer] = (
                torch.zeros_like(key, dtype=wide),
                torch.zeros_like(value, dtype=wide),
            )
        self.grads[layer][part][:, :, at] += grad


class _KeysReady(Exception):
    """Ends the part of the last layer that every token takes; its keys and values are held."""


@dataclass(slots=True, kw_only=True)
class Run:
    """One pass of a model over a portion.

    In the last layer only ``rows`` go beyond their keys and values: nobody reads the others.
    """

    layout: Layout
    rows: Tensor  # [R] ascending
    rows_layout: Layout
    kernel: Kernel
    ancestors: list[tuple[Memory, slice]]
    capture: Memory | None = None  # filled with the portion's own keys and values
    inject: Memory | None = None  # whose gradients come on top of the portion's own
    stop_at_keys: bool = False
    held: Pair | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if self.held is not None:
            (key, value), self.held = self.held, None
            return self.kernel(query, key, value, self.rows_layout, scale)
        if self.capture is not None:
            self.capture.pairs[layer] = key.detach(), value.detach()
        key, value = self._extend(layer, 0, key), self._extend(layer, 1, value)
        if self.stop_at_keys:
            self.held = key, value
            raise _KeysReady
        return self.kernel(query, key, value, self.layout, scale)

    def _extend(self, layer: int, part: int, own: Tensor) -> Tensor:
        """The portion's keys (part 0) or values (1) with those of its ancestors behind them."""
        if self.inject is not None and own.requires_grad and layer in self.inject.grads:
            extra = self.inject.grads[layer][part]
            own.register_hook(lambda grad: grad + extra.to(grad.dtype))  # type: ignore[no-untyped-call]
        pieces = [own]
        for memory, at in self.ancestors:
            piece = memory.pairs[layer][part][:, :, at]
            if own.requires_grad:
                piece = piece.detach().requires_grad_()
                piece.register_hook(_adder(memory, layer, part, at))  # type: ignore[no-untyped-call]
            pieces.append(piece)
        return torch.cat(pieces, dim=2) if len(pieces) > 1 else own


def _adder(memory: Memory, layer: int, part: int, at: slice) -> Callable[[Tensor], None]:
    return lambda grad: memory.add(layer, part, at, grad)


def _tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    run: Run,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    dtype = value.dtype  # under autocast, norms and rotations leave queries and keys in fp32
    out = run.attend(module.layer_idx, query.to(dtype), key.to(dtype), value, scale)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, _tree_attention)


def _keep_rows(layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before the last layer: let all tokens make their keys and values, then go on with the rows.

    The layer's own forward runs up to its attention, so nothing is assumed of what it does there.
    """
    run: Run = kwargs["run"]
    run.stop_at_keys = True
    try:
        layer.forward(*args, **kwargs)
    except _KeysReady:
        pass
    finally:
        run.stop_at_keys = False
    cos, sin = kwargs["position_embeddings"]
    kept = {"position_embeddings": (cos[:, run.rows], sin[:, run.rows])}
    for name in ("hidden_states", "position_ids"):  # the former may be positional
        if kwargs.get(name) is not None:
            kept[name] = kwargs[name][:, run.rows]
    return tuple(hidden[:, run.rows] for hidden in args), {**kwargs, **kept}


@contextmanager
def tree_attention(backbone: Any) -> Iterator[None]:
    """Let ``backbone`` attend through :class:`Run` in this block.

    It returns hidden states of the run's rows only. Layers whose gradient checkpointing is on
    use it although the model is in ``eval()`` mode, but for the last: what it keeps is little.
    """
    config = backbone.config
    before = config._attn_implementation
    layers = [x for x in backbone.layers[:-1] if getattr(x, "gradient_checkpointing", False)]
    hook = backbone.layers[-1].register_forward_pre_hook(_keep_rows, with_kwargs=True)
    try:
        config._attn_implementation = NAME
        for layer in layers:
            layer.training = True  # of this module alone: nothing inside it drops anything
        yield
    finally:
        hook.remove()
        config._attn_implementation = before
        for layer in layers:
            layer.training = False
