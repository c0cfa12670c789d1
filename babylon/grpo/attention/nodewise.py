"""Exact tree attention in pieces: plain attention for each segment, merged by log-sum-exp.

A query attends to its own segment and, in one dense piece each, to its ancestors'. The pieces'
outputs are merged with the weights of their log-sum-exps, and every piece's backward pass is run
with the merged output and log-sum-exp, which makes it exact (Ring Attention, arXiv 2310.01889;
FlashAttention, arXiv 2205.14135, algorithm 4). Nothing of size ``[Q, K]`` is ever held on CPU.
"""

from typing import Any

import torch
from torch import Tensor

from babylon.grpo.attention.layout import Layout, Local

_aten = torch.ops.aten


def nodewise_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float
) -> Tensor:
    """Attend ``[1, H, Q, d]`` to ``[1, G, K, d]``, H a multiple of G; returns ``[1, H, Q, d]``."""
    result: Tensor = _Nodewise.apply(query, key, value, layout, scale)
    return result


class _Nodewise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float
    ) -> Tensor:
        _, heads, queries, _ = query.shape
        out = query.new_empty(1, queries, heads, value.shape[-1]).transpose(1, 2)
        lse = query.new_empty(1, queries, heads, dtype=_wide(query)).transpose(1, 2)
        for piece in layout.local:
            q, k = slice(piece.first, piece.last), slice(piece.start, piece.end)
            qs = _split(query[:, :, q], piece.count)
            ks, vs = (_split(t[:, :, k], piece.count) for t in (key, value))
            o, total = _attend(qs, ks, vs, scale, _mask(piece, query), piece.mask is None)
            _split(out[:, :, q], piece.count).copy_(o)
            _split(lse[:, :, q, None], piece.count).copy_(total[..., None])
        for dense in layout.dense:
            q, k = slice(dense.first, dense.last), slice(dense.start, dense.end)
            o, total = _attend(query[:, :, q], key[:, :, k], value[:, :, k], scale)
            merged = lse[:, :, q]
            share = torch.sigmoid(total - merged)[..., None]
            out[:, :, q].lerp_(o, share.to(o.dtype))
            merged.copy_(torch.logaddexp(merged, total))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        d_query = torch.empty_like(query)
        d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
        for piece in layout.local:
            q, k = slice(piece.first, piece.last), slice(piece.start, piece.end)
            g, qs, o = (_split(t[:, :, q], piece.count) for t in (grad, query, out))
            ks, vs = (_split(t[:, :, k], piece.count) for t in (key, value))
            total = _split(lse[:, :, q, None], piece.count)[..., 0]
            mask = _mask(piece, query)
            grads = _attend_backward(g, qs, ks, vs, o, total, scale, mask, piece.mask is None)
            for result, part, at in zip((d_query, d_key, d_value), grads, (q, k, k), strict=True):
                _split(result[:, :, at], piece.count).copy_(part)
        for dense in layout.dense:
            q, k = slice(dense.first, dense.last), slice(dense.start, dense.end)
            g, qs, o, total = (t[:, :, q] for t in (grad, query, out, lse))
            grads = _attend_backward(g, qs, key[:, :, k], value[:, :, k], o, total, scale)
            for result, part, at in zip((d_query, d_key, d_value), grads, (q, k, k), strict=True):
                result[:, :, at] += part
        return d_query, d_key, d_value, None, None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _split(tensor: Tensor, count: int) -> Tensor:
    """``[1, H, count * n, d]`` as ``[count, H, n, d]``, without a copy."""
    if count == 1:
        return tensor
    _, heads, _, width = tensor.shape
    return tensor.view(heads, count, -1, width).transpose(0, 1)


def _mask(piece: Local, like: Tensor) -> Tensor | None:
    if piece.mask is None:
        return None
    return torch.from_numpy(piece.mask).to(like.device, like.dtype)[None, None]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Q, d]`` and log-sum-exp ``[B, H, Q]`` of one piece."""
    if query.device.type == "cpu":
        result: tuple[Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        return result
    scores = _scores(query, key, scale, mask, causal)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().to(value.dtype)
    return weights @ _per_head(value, query), lse


def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    if query.device.type == "cpu":
        result: tuple[Tensor, Tensor, Tensor] = (
            _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=scale
            )
        )
        return result
    weights = (_scores(query, key, scale, mask, causal) - lse[..., None]).exp()
    d_weights = (grad @ _per_head(value, query).transpose(-1, -2)).to(weights.dtype)
    delta = (grad * out).sum(-1, dtype=weights.dtype, keepdim=True)
    d_scores = (weights * (d_weights - delta) * scale).to(query.dtype)
    d_key = _per_group(d_scores.transpose(-1, -2) @ query, key)
    d_value = _per_group(weights.to(grad.dtype).transpose(-1, -2) @ grad, value)
    return d_scores @ _per_head(key, query), d_key, d_value


def _scores(
    query: Tensor, key: Tensor, scale: float, mask: Tensor | None, causal: bool
) -> Tensor:
    scores = (query @ _per_head(key, query).transpose(-1, -2)).to(_wide(query)) * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores if mask is None else scores + mask


def _per_head(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def _per_group(grad: Tensor, like: Tensor) -> Tensor:
    batch, groups, keys, width = like.shape
    return grad.view(batch, groups, -1, keys, width).sum(2)
