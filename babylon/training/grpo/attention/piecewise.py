"""Exact tree attention from pieces of plain attention, merged by log-sum-exp.

A query attends to its own segment, and to each ancestor's segment in one dense piece. The outputs
of the pieces are merged with the weights of their log-sum-exps. Each piece's backward pass gets the
merged output and log-sum-exp, which makes its gradient exact (Ring Attention, arXiv 2310.01889;
FlashAttention, arXiv 2205.14135, algorithm 4). Nothing of size ``[Q, K]`` is stored on the CPU.

Shapes of a piece: query, out and grad ``[B, H, Q, d]``, key and value ``[B, G, K, d]`` with H a
multiple of G, log-sum-exp ``[B, H, Q]``. On the CPU a piece is one fused kernel. Elsewhere it is
explicit and holds ``[B, H, Q, K]``, which is small for one piece.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from babylon.training.grpo.attention.layout import Layout, LocalPiece

_aten = torch.ops.aten


def piecewise_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float
) -> Tensor:
    """Attend ``[1, H, Q, d]`` to ``[1, G, K, d]``, H a multiple of G → ``[1, H, Q, d]``."""
    return _Piecewise.apply(query, key, value, layout, scale)  # type: ignore[no-any-return, no-untyped-call]


class _Context(FunctionCtx):
    layout: Layout
    scale: float
    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class _Piecewise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float
    ) -> Tensor:
        _, heads, queries, _ = query.shape
        wide = wide_dtype(query)  # of sums over pieces
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
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
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
    """View ``[1, H, count * n, d]`` as ``[count, H, n, d]``."""
    if count == 1:
        return tensor
    _, heads, _, width = tensor.shape
    return tensor.view(heads, count, -1, width).transpose(0, 1)


def _mask(piece: LocalPiece, like: Tensor) -> Tensor | None:
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
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    *,
    explicit: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, Q, d]`` and log-sum-exp ``[B, H, Q]`` of one piece."""
    if query.device.type == "cpu" and not explicit:
        result: tuple[Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        return result
    scores = _scores(query, key, scale, mask, causal)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().to(value.dtype)
    return weights @ _per_head(value, query), lse


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    *,
    explicit: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, from the output and log-sum-exp over all pieces."""
    if query.device.type == "cpu" and not explicit:
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


def _scores(query: Tensor, key: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
    scores = (query @ _per_head(key, query).transpose(-1, -2)).to(wide_dtype(query)) * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores if mask is None else scores + mask


def _per_head(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def _per_group(grad: Tensor, like: Tensor) -> Tensor:
    batch, groups, keys, width = like.shape
    return grad.view(batch, groups, -1, keys, width).sum(2)
