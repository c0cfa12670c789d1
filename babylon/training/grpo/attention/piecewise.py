"""Exact tree attention in pieces: plain attention for each segment, merged by log-sum-exp.

A query attends to its own segment and, in one dense piece each, to its ancestors'. The pieces'
outputs are merged with the weights of their log-sum-exps, and every piece's backward pass is run
with the merged output and log-sum-exp, which makes it exact (Ring Attention, arXiv 2310.01889;
FlashAttention, arXiv 2205.14135, algorithm 4). Nothing of size ``[Q, K]`` is ever held on CPU.
"""

from typing import Any

import torch
from torch import Tensor

from babylon.training.grpo.attention.layout import Layout, Local
from babylon.training.grpo.attention.pieces import attend, attend_backward, wide_dtype


def nodewise_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float
) -> Tensor:
    """Attend ``[1, H, Q, d]`` to ``[1, G, K, d]``, H a multiple of G; returns ``[1, H, Q, d]``."""
    return _Nodewise.apply(query, key, value, layout, scale)  # type: ignore[no-any-return, no-untyped-call]


class _Nodewise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float
    ) -> Tensor:
        _, heads, queries, _ = query.shape
        wide = wide_dtype(query)  # pieces are merged and their gradients added up in fp32 at least
        out = query.new_empty(1, queries, heads, value.shape[-1], dtype=wide).transpose(1, 2)
        lse = query.new_empty(1, queries, heads, dtype=wide).transpose(1, 2)
        for piece in layout.local:
            q, k = slice(piece.first, piece.last), slice(piece.start, piece.end)
            qs = _split(query[:, :, q], piece.count)
            ks, vs = (_split(t[:, :, k], piece.count) for t in (key, value))
            o, total = attend(qs, ks, vs, scale, _mask(piece, query), piece.mask is None)
            _split(out[:, :, q], piece.count).copy_(o)
            _split(lse[:, :, q, None], piece.count).copy_(total[..., None])
        for dense in layout.dense:
            q, k = slice(dense.first, dense.last), slice(dense.start, dense.end)
            o, total = attend(query[:, :, q], key[:, :, k], value[:, :, k], scale)
            merged = lse[:, :, q]
            share = torch.sigmoid(total - merged)[..., None]
            out[:, :, q].lerp_(o.to(wide), share)
            merged.copy_(torch.logaddexp(merged, total))
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        wide = wide_dtype(query)
        d_query = torch.empty_like(query, dtype=wide)
        d_key, d_value = (torch.zeros_like(t, dtype=wide) for t in (key, value))
        for piece in layout.local:
            q, k = slice(piece.first, piece.last), slice(piece.start, piece.end)
            g, qs, o = (_split(t[:, :, q], piece.count) for t in (grad, query, out))
            ks, vs = (_split(t[:, :, k], piece.count) for t in (key, value))
            total = _split(lse[:, :, q, None], piece.count)[..., 0]
            mask = _mask(piece, query)
            grads = attend_backward(g, qs, ks, vs, o, total, scale, mask, piece.mask is None)
            for result, part, at in zip((d_query, d_key, d_value), grads, (q, k, k), strict=True):
                _split(result[:, :, at], piece.count).copy_(part)
        for dense in layout.dense:
            q, k = slice(dense.first, dense.last), slice(dense.start, dense.end)
            g, qs, o, total = (t[:, :, q] for t in (grad, query, out, lse))
            grads = attend_backward(g, qs, key[:, :, k], value[:, :, k], o, total, scale)
            for result, part, at in zip((d_query, d_key, d_value), grads, (q, k, k), strict=True):
                result[:, :, at] += part
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None


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
