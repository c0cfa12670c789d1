"""Tree attention inside any transformers model that uses the attention registry.

``tree_attention`` replaces the model's attention. The model is then called with an additional
argument ``run``, an :class:`AttentionRun` that defines which tokens see which. transformers passes
it on to every layer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from babylon.training.grpo.attention.layout import Layout
from babylon.training.grpo.attention.piecewise import AttentionRule

NAME = "prefix_tree"
Attention = Callable[[Tensor, Tensor, Tensor, Layout, AttentionRule, Tensor | None], Tensor]
Pair = tuple[Tensor, Tensor]  # keys and values, [1, G, n, d]


@dataclass(slots=True)
class KeyValueCache:
    """Keys and values of a portion by layer, and their gradients from descendant portions."""

    pairs: dict[int, Pair] = field(default_factory=dict)
    grads: dict[int, Pair] = field(default_factory=dict)

    def add(self, layer: int, part: int, at: slice | Tensor, grad: Tensor) -> None:
        """Add a gradient of the keys (part 0) or values (part 1) at some positions."""
        if layer not in self.grads:
            key, value = self.pairs[layer]
            # many descendants add their gradients, so the sum is fp32 or wider
            wide = torch.promote_types(key.dtype, torch.float32)
            self.grads[layer] = (
                torch.zeros_like(key, dtype=wide),
                torch.zeros_like(value, dtype=wide),
            )
        self.grads[layer][part][:, :, at] += grad

    def completed(self, layer: int, part: int, grad: Tensor) -> Tensor:
        """A gradient from the portion's own queries, and those from its descendants."""
        if layer not in self.grads:
            return grad
        return grad + self.grads[layer][part].to(grad.dtype)


class _KeysReady(Exception):
    """Stops the last layer's first pass, once the keys and values of all tokens are computed."""


@dataclass(slots=True, kw_only=True)
class AttentionRun:
    """One pass of a model over a portion.

    The last layer computes keys and values of all tokens, and outputs of ``rows`` only.
    """

    layout: Layout
    rows: Tensor  # [R] ascending
    rows_layout: Layout
    attention: Attention
    ancestors: list[tuple[KeyValueCache, slice | Tensor]]
    own: KeyValueCache | None = None  # of a portion with descendants, for them and from them
    stop_at_keys: bool = False
    held: Pair | None = None

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: AttentionRule,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of one layer, over the portion's keys and its ancestors'."""
        if self.held is not None:
            (key, value), self.held = self.held, None
            return self.attention(query, key, value, self.rows_layout, rule, sinks)
        if self.own is not None:
            self.own.pairs[layer] = key.detach(), value.detach()
        key, value = self._extend(layer, 0, key), self._extend(layer, 1, value)
        if self.stop_at_keys:
            self.held = key, value
            raise _KeysReady
        return self.attention(query, key, value, self.layout, rule, sinks)

    def _extend(self, layer: int, part: int, own: Tensor) -> Tensor:
        """The portion's keys (part 0) or values (part 1), followed by its ancestors'."""
        if self.own is not None and own.requires_grad:
            own.register_hook(partial(self.own.completed, layer, part))  # type: ignore[no-untyped-call]
        pieces = [own]
        for cache, at in self.ancestors:
            piece = cache.pairs[layer][part][:, :, at]
            if own.requires_grad:
                piece = piece.detach().requires_grad_()
                piece.register_hook(_adder(cache, layer, part, at))  # type: ignore[no-untyped-call]
            pieces.append(piece)
        return torch.cat(pieces, dim=2) if len(pieces) > 1 else own


def _adder(
    cache: KeyValueCache, layer: int, part: int, at: slice | Tensor
) -> Callable[[Tensor], None]:
    return lambda grad: cache.add(layer, part, at, grad)


def _tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    run: AttentionRun,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    dtype = value.dtype  # under autocast, norms and rotations return queries and keys in fp32
    layer = cast(int, module.layer_idx)
    if sliding_window != (expected := layer_window(cast(PreTrainedConfig, module.config), layer)):
        raise ValueError(
            f"layer {layer} passes a window of {sliding_window} to its attention, and its"
            f" configuration has {expected}"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = AttentionRule(scale, sliding_window, softcap)
    out = run.attend(layer, query.to(dtype), key.to(dtype), value, rule, s_aux)
    return out.transpose(1, 2), None


def layer_window(config: PreTrainedConfig, layer: int) -> int | None:
    """Tokens that a layer's attention slides over, by the configuration. None: it sees all."""
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or kinds[layer] == "sliding_attention"
    return getattr(config, "sliding_window", None) if slides else None


AttentionInterface.register(NAME, _tree_attention)


def _keep_rows(
    layer: torch.nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Hook of the last layer: compute the keys and values of all tokens, then keep only the rows.

    It runs the layer's own forward up to the attention, so it does not depend on the code there.
    """
    run: AttentionRun = kwargs["run"]
    run.stop_at_keys = True
    try:
        layer.forward(*args, **kwargs)
    except _KeysReady:
        pass
    finally:
        run.stop_at_keys = False
    cos, sin = kwargs["position_embeddings"]
    kept = {"position_embeddings": (cos[:, run.rows], sin[:, run.rows])}
    for name in ("hidden_states", "position_ids"):  # hidden_states can be positional
        if kwargs.get(name) is not None:
            kept[name] = kwargs[name][:, run.rows]
    return tuple(hidden[:, run.rows] for hidden in args), {**kwargs, **kept}


@contextmanager
def tree_attention(backbone: PreTrainedModel) -> Iterator[None]:
    """Context in which ``backbone`` attends through the :class:`AttentionRun` it is called with.

    The backbone returns hidden states of the run's rows only. Gradient checkpointing works although
    the model is in ``eval()`` mode, except in the last layer, whose activations are few.
    """
    config = backbone.config
    before = config._attn_implementation
    if before == NAME:  # inside another such context
        yield
        return
    *others, last = cast(torch.nn.ModuleList, backbone.layers)
    layers = [layer for layer in others if getattr(layer, "gradient_checkpointing", False)]
    hook = last.register_forward_pre_hook(_keep_rows, with_kwargs=True)
    try:
        config._attn_implementation = NAME
        for layer in layers:
            layer.training = True  # this flag only: dropout modules inside stay in eval mode
        yield
    finally:
        hook.remove()
        config._attn_implementation = before
        for layer in layers:
            layer.training = False
