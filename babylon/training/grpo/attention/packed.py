"""Tree attention on CUDA: one kernel over the whole portion.

FlexAttention (arXiv 2412.05496) has every rule and precision. In depth-first order, the queries
that see a key are one interval. The mask is therefore two integers a key, and the table of
non-empty 128 x 128 blocks is computed from the intervals alone. Where FlashAttention knows the
rule and few keys are copied, it is faster: see ``paths.py``.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from types import FunctionType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from babylon.training.grpo.attention.layout import Ints, Layout
from babylon.training.grpo.attention.paths import path_attention, takes_paths
from babylon.training.grpo.attention.piecewise import AttentionRule

_BLOCK = 128
_MIN_WIDTH = 16  # of queries, keys and values: a limit of FlexAttention's kernels


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    rule: AttentionRule,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend ``[1, H, Q, d]`` to ``[1, G, K, d]``, H a multiple of G → ``[1, H, Q, v]``.

    Neither kernel has a backward pass on the CPU. There all scores are in memory.
    """
    if not query.is_cuda:
        return _explicit(query, key, value, layout, rule, sinks)
    if takes_paths(query, value, layout, rule, sinks):
        return path_attention(query, key, value, layout, rule)
    mask = block_mask(layout, rule.window, query.device)
    grad = torch.is_grad_enabled() and query.requires_grad
    kernel = _flex(rule.softcap, query.device, sinks is not None, query.dtype, grad, rule.window)
    out = in_blocks(kernel, query, key, value, mask, rule, sinks)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def in_blocks(
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    rule: AttentionRule,
    sinks: Tensor | None,
) -> Tensor:
    """Call a kernel of :func:`flex_variant` on whole blocks → ``[1, H, Q, v]``.

    A sink is one more key of value zero, so it takes its share of the weight from the others.
    """
    queries, keys = mask.seq_lengths
    width = value.shape[3]
    padded = (_pad(query, queries), _pad(key, keys), _pad(value, keys))
    out = kernel(*padded, mask, rule.scale)
    if sinks is not None:
        out, lse = out
        share = torch.sigmoid(lse - sinks.to(lse.dtype)[None, :, None])
        out = (out * share[..., None]).to(query.dtype)
    result: Tensor = out[:, :, : query.shape[2], :width]
    return result


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    rule: AttentionRule,
    sinks: Tensor | None,
) -> Tensor:
    index = torch.arange(layout.queries)[:, None]
    first, last, at = (torch.from_numpy(t) for t in (layout.first, layout.last, layout.positions))
    seen = (first <= index) & (index < last)
    if rule.window is not None:
        seen &= at[torch.from_numpy(layout.rows)][:, None] - at < rule.window
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~seen.to(scores.device), -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    return scores.softmax(-1).to(value.dtype)[..., : key.shape[2]] @ value


@lru_cache(maxsize=8)  # the last layer has a layout of its own, and layers can have a window
def block_mask(layout: Layout, window: int | None, device: torch.device) -> BlockMask:
    """The mask over queries and keys, each padded to whole blocks.

    The padded queries see the last padded key, so that every query sees some key. There are two
    blocks of queries at least, and more of keys: dimensions of size one, and equal ones, would
    each be compiled anew.
    """
    rows = max(2, -(-layout.queries // _BLOCK))
    queries, keys = rows * _BLOCK, max(rows + 1, len(layout.first) // _BLOCK + 1) * _BLOCK
    first, last = np.zeros((2, keys), dtype=np.int64)
    first[: len(layout.first)], last[: len(layout.last)] = layout.first, layout.last
    first[-1], last[-1] = layout.queries, queries
    some, every = _blocks(first, last, queries)
    tables, reach = [first, last], window or 0
    if window is not None:  # padding is as close as its neighbours
        at = np.pad(layout.positions, (0, keys - len(layout.positions)), mode="edge")
        own = layout.positions[layout.rows]
        own = np.pad(own, (0, queries - len(own)), mode="edge")
        at[-1] = own[-1]
        near, far = _distances(own, at)
        some, every = some & (near < window), every & (far < window)
        tables += [at, own]
    partial, full = (_listed(blocks, device) for blocks in (some & ~every, every))
    first_seen, last_seen, *positions = (
        torch.from_numpy(t).to(device, torch.int32) for t in tables
    )

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first_seen[key] <= query) & (query < last_seen[key])

    def near_and_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at, own = positions
        return visible(batch, head, query, key) & (own[query] - at[key] < reach)

    return BlockMask.from_kv_blocks(
        *partial,
        *full,
        BLOCK_SIZE=_BLOCK,
        mask_mod=visible if window is None else near_and_visible,
        seq_lengths=(queries, keys),
    )


def _distances(queries: Ints, keys: Ints) -> tuple[Ints, Ints]:
    """Shortest and longest distance of a query and a key, for all pairs of blocks."""
    q, k = queries.reshape(-1, 1, _BLOCK), keys.reshape(1, -1, _BLOCK)
    return q.min(-1) - k.max(-1), q.max(-1) - k.min(-1)


def _blocks(
    first: NDArray[np.int64], last: NDArray[np.int64], queries: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Masks ``[queries / 128, keys / 128]`` of blocks with some, and with only, visible pairs."""
    key_block = np.arange(len(first)) // _BLOCK
    rows, columns = queries // _BLOCK, len(first) // _BLOCK
    counts = np.zeros((rows + 1, columns), dtype=np.int64)  # of visible keys, as differences
    seen = first < last
    np.add.at(counts, (first[seen] // _BLOCK, key_block[seen]), 1)
    np.add.at(counts, ((last[seen] - 1) // _BLOCK + 1, key_block[seen]), -1)
    some = counts.cumsum(axis=0)[:-1] > 0
    start = np.arange(rows)[:, None] * _BLOCK
    latest = first.reshape(columns, _BLOCK).max(axis=1)
    earliest = last.reshape(columns, _BLOCK).min(axis=1)
    return some, (latest <= start) & (earliest >= start + _BLOCK)


def _listed(blocks: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Number of blocks a row ``[1, 1, R]``, and all columns, the row's first ``[1, 1, R, C]``."""
    columns = np.argsort(~blocks, axis=1, kind="stable")
    tensors = (torch.from_numpy(t).to(device, torch.int32) for t in (blocks.sum(axis=1), columns))
    number, index = tensors
    return number[None, None], index[None, None].contiguous()


def _pad(tensor: Tensor, length: int) -> Tensor:
    width = max(0, _MIN_WIDTH - tensor.shape[3])
    return torch.nn.functional.pad(tensor, (0, width, 0, length - tensor.shape[2]))


def flex_variant(softcap: Tensor | None, sinks: bool) -> Callable[..., Any]:
    """FlexAttention with this soft cap. With sinks, it also returns the log-sum-exps.

    The cap is a tensor, because the compiler would make a symbol of a number.
    """

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        assert softcap is not None
        return torch.tanh(score / softcap) * softcap

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Any:
        options: dict[str, Any] = {"return_aux": AuxRequest(lse=True)} if sinks else {}
        change = None if softcap is None else capped
        found: Any = flex_attention(
            query, key, value, change, mask, scale=scale, enable_gqa=True, **options
        )
        return (found[0], found[1].lse) if sinks else found

    return attend


@cache
def _flex(
    softcap: float | None,
    device: torch.device,
    sinks: bool,
    dtype: torch.dtype,
    grad: bool,
    window: int | None,
) -> Callable[..., Any]:
    cap = None if softcap is None else torch.tensor(softcap, device=device)
    return compiled_apart(flex_variant(cap, sinks))


def compiled_apart(variant: Callable[..., Any], backend: Any = "inductor") -> Callable[..., Any]:
    """Compile a variant whose recompilations count by themselves.

    torch counts them by code object, and after eight it runs FlexAttention with all scores in
    memory. Therefore each variant, dtype, gradient mode and mask has a code object of its own, and
    only sizes are left to recompile for.
    """
    made = cast(FunctionType, variant)
    own = FunctionType(
        made.__code__.replace(),
        made.__globals__,
        made.__name__,
        made.__defaults__,
        made.__closure__,
    )
    compiled: Callable[..., Any] = torch.compile(own, dynamic=True, backend=backend)
    return compiled
