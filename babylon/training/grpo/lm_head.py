"""The language-model head at trained positions only, in chunks of rows.

Only rows that predict a trained token reach the head, and each (position, temperature) only once,
even if several calls read it. Statistics over the vocabulary are fp32. If there is more than one
chunk, the backward pass recomputes the logits, so ``[M, V]`` never exists for all M.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

_CHUNK_ELEMENTS = 2**22  # logits of a chunk: 16 MiB of fp32 fit into a CPU cache
_MIN_ROWS = 256  # with fewer rows, reading the weights takes longer than the products

Head = Callable[[Tensor], Tensor]


def token_values(
    head: Head, vocabulary: int, hidden: Tensor, temperature: Tensor, row: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of M targets, and entropies of the distributions that predict them.

    Args:
        head: maps ``[R, h]`` to logits ``[R, V]``.
        hidden: ``[R, h]``, the rows that predict a target.
        temperature: ``[R]``, divisor of each row's logits.
        row: ``[M]`` ascending, the row that predicts each target.
        target: ``[M]``, token ids.

    Returns:
        Log-probabilities ``[M]`` with gradient and entropies ``[M]`` without, fp32, in nats.
    """
    rows = max(_MIN_ROWS, _CHUNK_ELEMENTS // vocabulary)

    def chunk(
        hidden: Tensor, temperature: Tensor, row: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        # no autocast: rounding a logit to bf16 changes it more than a small update does
        with torch.autocast(hidden.device.type, enabled=False):
            result: tuple[Tensor, Tensor] = _Statistics.apply(  # type: ignore[no-untyped-call]
                head(hidden), temperature, row, target
            )
        return result

    if len(hidden) <= rows:
        return chunk(hidden, temperature, row, target)
    bounds = torch.arange(0, len(hidden) + rows, rows, device=row.device)
    edges = torch.searchsorted(row, bounds).tolist()
    parts = []
    for start, first, last in zip(bounds.tolist(), edges, edges[1:], strict=False):
        at = slice(start, start + rows)
        inputs = hidden[at], temperature[at], row[first:last] - start, target[first:last]
        parts.append(checkpoint(chunk, *inputs, use_reentrant=False, preserve_rng_state=False))
    logprobs, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, entropy


class _Context(FunctionCtx):
    dtype: torch.dtype
    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class _Statistics(torch.autograd.Function):
    """``log_softmax(logits / temperature)[row, target]`` and entropy, in few memory passes."""

    @staticmethod
    def forward(
        ctx: _Context, logits: Tensor, temperature: Tensor, row: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scaled = scaled / temperature.to(scaled.dtype)[:, None]
        highest = scaled.amax(-1)
        weights = (scaled - highest[:, None]).exp_()
        total = weights.sum(-1)
        normaliser = highest + total.log()
        logprobs = scaled[row, target] - normaliser[row]
        mean = torch.bmm(weights[:, None, :], scaled[:, :, None])[:, 0, 0] / total
        entropy = (normaliser - mean)[row]
        ctx.save_for_backward(weights, total, temperature, row, target)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: _Context, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        weights, total, temperature, row, target = ctx.saved_tensors
        mass = torch.zeros_like(total).index_add_(0, row, grad)
        temperature = temperature.to(total.dtype)
        d_logits = weights * (-mass / (total * temperature))[:, None]
        d_logits.index_put_((row, target), grad / temperature[row], accumulate=True)
        return d_logits.to(ctx.dtype), None, None, None
