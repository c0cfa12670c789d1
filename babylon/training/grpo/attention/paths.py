"""Tree attention by FlashAttention: each segment of queries attends to a copy of its path's keys.

Every pair of a query and a key that it sees is computed once, and keys that many segments see are
copied for each. Heads and segments run in parallel, also backwards.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from babylon.training.grpo.attention.layout import Ints, Layout
from babylon.training.grpo.attention.piecewise import AttentionRule

_COPIES = 8  # of a key, on average: more take more memory than the activations of a layer
_WIDEST = 256  # of a head, a limit of the kernel
_AMPERE = (8, 0)  # the kernel has no older devices
_BLOCK = 128  # rows of fp32 that the kernel's backward pass adds for each segment of queries
# torch 2.11 takes groups of heads without being asked
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """S segments of queries, and the keys from the root to each. Segments are causal at the end."""

    keys: Tensor  # [N], one path after the other
    query_starts: Tensor  # [S + 1]
    key_starts: Tensor  # [S + 1]
    longest_segment: int
    longest_path: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cuts:
    """The bounds of the segments, and the number of keys on the path to each."""

    bounds: Ints  # [S + 1]
    lengths: Ints  # [S]


@lru_cache(maxsize=8)  # the last layer has a layout of its own
def _cuts(layout: Layout) -> _Cuts:
    """Cut the queries where the next one sees more than one new key, or fewer old ones."""
    seen = layout.first < layout.last
    new, gone = (
        np.bincount(at[seen], minlength=layout.queries + 1) for at in (layout.first, layout.last)
    )
    later = np.arange(1, layout.queries)
    cuts = later[(new[later] != 1) | (gone[later] > 0)]
    bounds = np.array([0, *cuts, layout.queries])
    visible = (new - gone).cumsum()
    return _Cuts(bounds=bounds, lengths=visible[bounds[1:] - 1])  # the last query sees the path


@lru_cache(maxsize=8)
def paths_of(layout: Layout, device: torch.device) -> Paths:
    """Return the segments of a layout's queries, and their paths."""
    cuts = _cuts(layout)
    seen = np.flatnonzero(layout.first < layout.last)
    order = seen[np.argsort(layout.first[seen], kind="stable")]
    first, last = layout.first[order], layout.last[order]
    keys = []
    for start, end in pairwise(cuts.bounds.tolist()):
        until = np.searchsorted(first, end)
        keys.append(order[:until][last[:until] > start])

    def starts(lengths: Ints) -> Tensor:
        return torch.from_numpy(np.append(0, lengths.cumsum())).to(device, torch.int32)

    return Paths(
        keys=torch.from_numpy(np.concatenate(keys)).to(device),
        query_starts=starts(np.diff(cuts.bounds)),
        key_starts=starts(cuts.lengths),
        longest_segment=int(np.diff(cuts.bounds).max()),
        longest_path=int(cuts.lengths.max()),
    )


def takes_paths(
    query: Tensor, value: Tensor, layout: Layout, rule: AttentionRule, sinks: Tensor | None
) -> bool:
    """True if FlashAttention has the rule, precision and widths, and copies and segments are few.

    Copies are counted first. Where they are too many, a list of them would take gigabytes.
    """
    plain = rule.window is None and rule.softcap is None and sinks is None
    half = query.dtype in (torch.bfloat16, torch.float16)
    width = query.shape[3]
    if not plain or not half or width != value.shape[3] or width % 8 or width > _WIDEST:
        return False
    if query.is_cuda and torch.cuda.get_device_capability(query.device) < _AMPERE:
        return False
    lengths = _cuts(layout).lengths
    return max(int(lengths.sum()), _BLOCK * len(lengths)) <= _COPIES * max(
        _BLOCK, len(layout.first)
    )


def path_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, rule: AttentionRule
) -> Tensor:
    """Attend ``[1, H, Q, d]`` to ``[1, G, K, d]``, H a multiple of G → ``[1, H, Q, d]``."""
    paths = paths_of(layout, query.device)
    keys, values = _copied(key, paths), _copied(value, paths)
    with _copied_again((key, value), (keys, values), paths):
        out = segments_attend(query[0].transpose(0, 1), keys, values, paths, rule.scale)
    return out.transpose(0, 1)[None]


@contextmanager
def _copied_again(
    sources: Sequence[Tensor], copies: Sequence[Tensor], paths: Paths
) -> Iterator[None]:
    """Copy again in the backward pass. Until then, all layers would keep their copies.

    Inside a checkpoint nothing is kept anyway, and its hooks must stay the innermost ones.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        yield
        return
    pairs = list(zip(copies, sources, strict=True))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: next((_Again(s) for c, s in pairs if _same(saved, c)), saved),
        lambda kept: _copied(kept.source, paths) if isinstance(kept, _Again) else kept,
    ):
        yield
    pairs.clear()  # the hooks live on


@dataclass(frozen=True, slots=True)
class _Again:
    """Stands for a copy that is made again."""

    source: Tensor


def _copied(source: Tensor, paths: Paths) -> Tensor:
    """Copy ``[1, G, K, d]`` to ``[N, G, d]``, through fp32: many paths add to a key's gradient."""
    return source[0].transpose(0, 1).float()[paths.keys].to(source.dtype)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def segments_attend(
    query: Tensor, key: Tensor, value: Tensor, paths: Paths, scale: float
) -> Tensor:
    """Attend segments of ``[Q, H, d]`` to their paths in ``[N, G, d]``, on CUDA in one kernel."""
    if query.is_cuda:
        found = varlen_attn(
            query,
            key,
            value,
            paths.query_starts,
            paths.key_starts,
            paths.longest_segment,
            paths.longest_path,
            scale=scale,
            window_size=(-1, 0),
            **_GROUPED,
        )
        return cast(Tensor, found)  # without the log-sum-exps
    segments = []
    places = (pairwise(starts.tolist()) for starts in (paths.query_starts, paths.key_starts))
    for own, path in zip(*places, strict=True):
        length, past = own[1] - own[0], path[1] - path[0] - own[1] + own[0]
        mask = torch.ones(length, length + past, dtype=torch.bool).tril(past)
        q, k, v = (
            one[slice(*at)].transpose(0, 1)[None]
            for one, at in ((query, own), (key, path), (value, path))
        )
        part = scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
        segments.append(part[0].transpose(0, 1))
    return torch.cat(segments)
