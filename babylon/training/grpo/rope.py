"""Rotary embeddings whose frequencies depend on the length of the sequence.

Such a model has one set of frequencies for short sequences and others for long ones (LongRoPE,
arXiv 2402.13753; NTK-aware scaling). transformers takes the longest position of a pass. A portion
of a tree, or a batch, must therefore hold only calls of one class, and must be told their length.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig


def length_classes(config: PreTrainedConfig, lengths: Sequence[int]) -> list[list[int]]:
    """Calls with the same frequencies, as positions in ``lengths`` (input tokens).

    All long calls of LongRoPE have the same frequencies; those of dynamic scaling have them only
    with equal lengths.
    """
    bounds = dict(_bounds(config))
    classes: dict[tuple[int, ...], list[int]] = {}
    for call, length in enumerate(lengths):
        key = tuple(
            0 if length <= bound else 1 if kind == "longrope" else length
            for kind, bound in bounds.items()
        )
        classes.setdefault(key, []).append(call)
    return list(classes.values())


def _bounds(config: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    """Kinds of rotary embedding that depend on the length, and the longest short sequence."""
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *(part for part in given.values() if isinstance(part, dict))):
        kind = rope.get("rope_type")
        if kind == "longrope":
            yield kind, int(rope["original_max_position_embeddings"])
        elif kind == "dynamic":
            yield kind, int(config.max_position_embeddings)


@contextmanager
def sequences_of(backbone: nn.Module, length: int) -> Iterator[None]:
    """Context in which rotary embeddings take every pass as one over sequences of ``length``."""
    config: Any = backbone.config
    if not dict(_bounds(config)):
        yield
        return

    def extend(rope: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if rope.rope_type == "dynamic":  # forget longer sequences
            rope.max_seq_len_cached = rope.original_max_seq_len
            rope.register_buffer("inv_freq", rope.original_inv_freq, persistent=False)
        given = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        last = torch.full_like(given[:, :1], length - 1)
        ids = torch.cat([given, last], dim=1)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": ids}
        return (args[0], ids, *args[2:]), kwargs

    def cut(_: nn.Module, __: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return output[0][:, :-1], output[1][:, :-1]

    with ExitStack() as stack:
        for module in backbone.modules():
            if hasattr(module, "rope_type") and hasattr(module, "original_max_seq_len"):
                stack.enter_context(module.register_forward_pre_hook(extend, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(cut))
        yield
