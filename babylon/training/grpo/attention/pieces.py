"""One piece of attention, with the log-sum-exp that merging needs: fused on CPU, else explicit.

Shapes: query, out and grad ``[B, H, Q, d]``, key and value ``[B, G, K, d]`` with H a multiple of
G, log-sum-exp ``[B, H, Q]``. Pieces are small: the explicit kind holds ``[B, H, Q, K]``.
"""

import torch
from torch import Tensor

_aten = torch.ops.aten


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """In which sums are taken: fp32, or the tensor's own if that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def attend(
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
    return explicit_attend(query, key, value, scale, mask, causal)


def explicit_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, given the output and log-sum-exp over all pieces."""
    if query.device.type == "cpu":
        result: tuple[Tensor, Tensor, Tensor] = (
            _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=scale
            )
        )
        return result
    return explicit_attend_backward(grad, query, key, value, out, lse, scale, mask, causal)


def explicit_attend_backward(
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
