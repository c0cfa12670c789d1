"""Exact tree attention from pieces of plain attention, merged by log-sum-exp.

A query attends to its own segment, and to each ancestor's segment in one dense piece. The outputs
of the pieces are merged with the weights of their log-sum-exps. Each piece's backward pass gets the
merged output and log-sum-exp, which makes its gradient exact (Ring Attention, arXiv 2310.01889;
FlashAttention, arXiv 2205.14135, algorithm 4). Nothing of size ``[Q, K]`` is stored on the CPU.

Sliding windows are part of the layout. An attention sink is one more key of value zero, merged at
the end (gpt-oss; Xiao et al. 2023, arXiv 2309.17453). A soft cap is ``c tanh(s / c)`` on the scores
(Gemma 2, arXiv 2408.00118, section 2).

Shapes of a piece: query, out and grad ``[B, H, Q, d]``, key and value ``[B, G, K, d]`` with H a
multiple of G, log-sum-exp ``[B, H, Q]``. On the CPU a piece is one fused kernel. Elsewhere, and
with a soft cap, it is explicit, in runs of queries whose scores ``[B, H, Q, K]`` are few.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from babylon.training.grpo.attention.layout import (
    DensePiece,
    Ints,
    Layout,
    LocalPiece,
    windowed,
)

_aten = torch.ops.aten
_SCORES = 2**22  # values of an explicit piece: 16 MiB of fp32


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Rule by which a layer weighs the keys that it sees."""

    scale: float
    window: int | None = None  # tokens
    softcap: float | None = None


def piecewise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    rule: AttentionRule,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend ``[1, H, Q, d]`` to ``[1, G, K, d]``, H a multiple of G → ``[1, H, Q, v]``.

    Values of another width v, as in MLA, are padded for the fused kernel. ``sinks`` ``[H]``.
    """
    if rule.window is not None:
        layout = windowed(layout, rule.window)
    width, wide = value.shape[-1], max(query.shape[-1], value.shape[-1])
    query, key, value = (_widened(t, wide) for t in (query, key, value))
    out: Tensor = _Piecewise.apply(query, key, value, layout, rule, sinks)  # type: ignore[no-untyped-call]
    return out[..., :width]


def _widened(tensor: Tensor, width: int) -> Tensor:
    missing = width - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


class _Context(FunctionCtx):
    layout: Layout
    rule: AttentionRule
    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]


class _Piecewise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: Layout,
        rule: AttentionRule,
        sinks: Tensor | None,
    ) -> Tensor:
        _, heads, queries, _ = query.shape
        wide = wide_dtype(query)  # of sums over pieces
        out = query.new_empty(1, queries, heads, value.shape[-1], dtype=wide).transpose(1, 2)
        lse = query.new_empty(1, queries, heads, dtype=wide).transpose(1, 2)
        for piece in layout.local:
            q, k = slice(piece.first, piece.last), slice(piece.start, piece.end)
            qs = _split(query[:, :, q], piece.count)
            ks, vs = (_split(t[:, :, k], piece.count) for t in (key, value))
            o, total = attend(qs, ks, vs, rule, _mask(piece, query), piece.mask is None)
            _split(out[:, :, q], piece.count).copy_(o)
            _split(lse[:, :, q, None], piece.count).copy_(total[..., None])
        for dense in layout.dense:
            q, kd = slice(dense.first, dense.last), places(dense.keys, query.device)
            ks, vs = key[:, :, kd], value[:, :, kd]
            o, total = attend(query[:, :, q], ks, vs, rule, _mask(dense, query))
            merged = lse[:, :, q]
            share = torch.sigmoid(total - merged)[..., None]
            out[:, :, q].lerp_(o.to(wide), share)
            merged.copy_(torch.logaddexp(merged, total))
        if sinks is not None:
            sink = sinks.to(wide)[None, :, None]
            out *= torch.sigmoid(lse - sink)[..., None]
            lse = torch.logaddexp(lse, sink)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse, sinks)  # type: ignore[arg-type]
        ctx.layout, ctx.rule = layout, rule
        return out

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, sinks = ctx.saved_tensors
        layout, rule = ctx.layout, ctx.rule
        wide = wide_dtype(query)
        d_query = torch.empty_like(query, dtype=wide)
        d_key, d_value = (torch.zeros_like(t, dtype=wide) for t in (key, value))
        for piece in layout.local:
            q, k = slice(piece.first, piece.last), slice(piece.start, piece.end)
            g, qs, o = (_split(t[:, :, q], piece.count) for t in (grad, query, out))
            ks, vs = (_split(t[:, :, k], piece.count) for t in (key, value))
            total = _split(lse[:, :, q, None], piece.count)[..., 0]
            mask = _mask(piece, query)
            grads = attend_backward(g, qs, ks, vs, o, total, rule, mask, piece.mask is None)
            for result, part, at in zip((d_query, d_key, d_value), grads, (q, k, k), strict=True):
                _split(result[:, :, at], piece.count).copy_(part)
        for dense in layout.dense:
            q, kd = slice(dense.first, dense.last), places(dense.keys, query.device)
            g, qs, o, total = (t[:, :, q] for t in (grad, query, out, lse))
            ks, vs, mask = key[:, :, kd], value[:, :, kd], _mask(dense, query)
            grads = attend_backward(g, qs, ks, vs, o, total, rule, mask)
            d_query[:, :, q] += grads[0]
            d_key[:, :, kd] += grads[1]
            d_value[:, :, kd] += grads[2]
        d_sinks = None
        if sinks is not None:  # its value is zero, so the score's gradient is -p * (grad . out)
            share = torch.exp(sinks.to(wide)[None, :, None] - lse)
            d_sinks = -(share * (grad * out).sum(-1, dtype=wide)).sum((0, 2)).to(sinks.dtype)
        parts = d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype)
        return *parts, None, None, d_sinks


def _split(tensor: Tensor, count: int) -> Tensor:
    """View ``[1, H, count * n, d]`` as ``[count, H, n, d]``."""
    if count == 1:
        return tensor
    _, heads, _, width = tensor.shape
    return tensor.view(heads, count, -1, width).transpose(0, 1)


def places(tokens: Ints, device: torch.device) -> slice | Tensor:
    """An index of ascending tokens: a slice, which copies nothing, if they have no gap."""
    start, end = int(tokens[0]), int(tokens[-1]) + 1
    if end - start == len(tokens):
        return slice(start, end)
    return torch.from_numpy(tokens).to(device)


def _mask(piece: LocalPiece | DensePiece, like: Tensor) -> Tensor | None:
    if piece.mask is None:
        return None
    return torch.from_numpy(piece.mask).to(like.device, like.dtype)[None, None]


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of sums: fp32, or the tensor's own if it is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: AttentionRule,
    mask: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Q, d]`` and log-sum-exp ``[B, H, Q]`` of one piece."""
    if query.device.type == "cpu" and rule.softcap is None:
        result: tuple[Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=rule.scale
        )
        return result
    parts = []
    for at in _runs_of_queries(query, key):
        scores, _ = _scores(query[:, :, at], key, rule, _visible(mask, causal, at, query, key))
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().to(value.dtype)
        parts.append((weights @ _per_head(value, query), lse))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    rule: AttentionRule,
    mask: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, from the output and log-sum-exp over all pieces."""
    if query.device.type == "cpu" and rule.softcap is None:
        result: tuple[Tensor, Tensor, Tensor] = (
            _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=rule.scale
            )
        )
        return result
    # runs of queries, as in the forward pass, so that few scores are in memory at once
    d_query = torch.empty_like(query)
    d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
    for at in _runs_of_queries(query, key):
        q, g = query[:, :, at], grad[:, :, at]
        scores, slope = _scores(q, key, rule, _visible(mask, causal, at, query, key))
        weights = (scores - lse[:, :, at, None]).exp()
        d_weights = (g @ _per_head(value, query).transpose(-1, -2)).to(weights.dtype)
        delta = (g * out[:, :, at]).sum(-1, dtype=weights.dtype, keepdim=True)
        d_scores = weights * (d_weights - delta) * rule.scale
        d_scores = (d_scores if slope is None else d_scores * slope).to(query.dtype)
        d_query[:, :, at] = d_scores @ _per_head(key, query)
        d_key += _per_group(d_scores.transpose(-1, -2) @ q, key)
        d_value += _per_group(weights.to(grad.dtype).transpose(-1, -2) @ g, value)
    return d_query, d_key, d_value


def _runs_of_queries(query: Tensor, key: Tensor) -> list[slice]:
    batch, heads, queries, _ = query.shape
    run = max(1, _SCORES // (batch * heads * key.shape[2]))
    return [slice(at, at + run) for at in range(0, queries, run)]


def _visible(
    mask: Tensor | None, causal: bool, at: slice, query: Tensor, key: Tensor
) -> Tensor | None:
    if causal:
        rows = torch.arange(query.shape[2], device=query.device)[at, None]
        future = torch.arange(key.shape[2], device=query.device) > rows
        return torch.zeros_like(future, dtype=query.dtype).masked_fill(future, -torch.inf)
    return None if mask is None else mask[..., at, :]


def _scores(
    query: Tensor, key: Tensor, rule: AttentionRule, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Scores, and the slope of their soft cap if there is one."""
    scores = (query @ _per_head(key, query).transpose(-1, -2)).to(wide_dtype(query)) * rule.scale
    slope = None
    if rule.softcap is not None:
        capped = torch.tanh(scores / rule.softcap)
        scores, slope = rule.softcap * capped, 1 - capped.square()
    return (scores if mask is None else scores + mask), slope


def _per_head(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def _per_group(grad: Tensor, like: Tensor) -> Tensor:
    batch, groups, keys, width = like.shape
    return grad.view(batch, groups, -1, keys, width).sum(2)
