"""Tree attention on CUDA: one FlexAttention call over the whole portion (arXiv 2412.05496).

In depth-first order, the queries that see a key are one interval. The mask is therefore two
integers a key, and the table of non-empty 128 x 128 blocks is computed from the intervals alone.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from babylon.training.grpo.attention.layout import Layout

_BLOCK = 128


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float
) -> Tensor:
    """Attend ``[1, H, Q, d]`` to ``[1, G, K, d]``, H a multiple of G → ``[1, H, Q, d]``.

    FlexAttention has no backward pass on the CPU. There the intervals become a dense mask.
    """
    if not query.is_cuda:
        rows = np.arange(layout.queries)[:, None]
        seen = torch.from_numpy((layout.first <= rows) & (rows < layout.last)).to(query.device)
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scale, enable_gqa=True
        )
    mask = block_mask(layout, query.device)
    queries, keys = mask.seq_lengths
    padded = (_pad(query, queries), _pad(key, keys), _pad(value, keys))
    out = _flex()(*padded, block_mask=mask, scale=scale, enable_gqa=True)
    return out[:, :, : query.shape[2]].transpose(1, 2).contiguous().transpose(1, 2)


@lru_cache(maxsize=4)  # the last layer has a layout of its own
def block_mask(layout: Layout, device: torch.device) -> BlockMask:
    """The mask over queries and keys, each padded to whole blocks.

    The padded queries see the last padded key, so that every query sees some key.
    """
    queries = -(-layout.queries // _BLOCK) * _BLOCK
    keys = (len(layout.first) // _BLOCK + 1) * _BLOCK
    first, last = np.zeros((2, keys), dtype=np.int64)
    first[: len(layout.first)], last[: len(layout.last)] = layout.first, layout.last
    first[-1], last[-1] = layout.queries, queries
    some, every = _blocks(first, last, queries)
    partial, full = (_listed(blocks, device) for blocks in (some & ~every, every))
    first_seen, last_seen = (torch.from_numpy(t).to(device, torch.int32) for t in (first, last))

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first_seen[key] <= query) & (query < last_seen[key])

    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=(queries, keys)
    )


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
    return torch.nn.functional.pad(tensor, (0, 0, 0, length - tensor.shape[2]))


@cache
def _flex() -> Callable[..., Tensor]:
    return cast(Callable[..., Tensor], torch.compile(flex_attention, dynamic=True))
