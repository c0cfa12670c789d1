"""Recovery from lack of memory: repeat the work in smaller portions, then fail with advice."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from babylon.training.grpo.forward import PolicyForward

logger = logging.getLogger(__name__)
T = TypeVar("T")
SMALLEST = 64  # tokens a portion: with fewer, activations are negligible beside the weights
CHECKPOINT_AFTER = 2  # halvings: recomputing all layers costs a third more time
_CPU_ALLOCATOR = ("can't allocate memory", "not enough memory")  # torch raises no special type


class OutOfMemoryError(MemoryError):
    """The smallest portion does not fit."""


class FittingForward:
    """Forward passes of one update, in portions that are halved when memory runs out."""

    def __init__(self, model: nn.Module, max_tokens: int | None) -> None:
        self._model = model
        self.halvings = 0
        self.checkpointing = False
        self.forward = PolicyForward(model, max_tokens=max_tokens)

    def run(self, attempt: Callable[[PolicyForward], T]) -> T:
        """Call ``attempt`` until it fits into memory, and return its result.

        Raises:
            OutOfMemoryError: it does not fit with the smallest portions.
        """
        while True:
            try:
                with mixed_precision(next(self._model.parameters()).device):
                    return attempt(self.forward)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            # outside the except block, where no traceback holds the failed attempt's tensors
            self._halve(reason)

    def restore(self, halvings: int) -> None:
        """Halve the portions as often as before the progress was saved."""
        while self.halvings < halvings:
            self._shrink()

    def _halve(self, reason: str) -> None:
        before = self.forward.max_tokens
        if before // 2 < SMALLEST:
            raise OutOfMemoryError(
                f"out of memory with portions of {before} tokens, the smallest that were tried"
                f" ({reason}): train with TUNING=lora, a smaller BASE_MODEL, shorter prompts, or"
                " more memory"
            )
        self._shrink()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        logger.warning(
            "out of memory with portions of %d tokens: the step is repeated with %d%s (%s)",
            before,
            self.forward.max_tokens,
            " and activations recomputed in the backward pass" if self.checkpointing else "",
            reason,
        )

    def _shrink(self) -> None:
        self.halvings += 1
        bound, path = self.forward.max_tokens // 2, self.forward.path
        self.forward = PolicyForward(self._model, max_tokens=bound, path=path)
        if self.halvings >= CHECKPOINT_AFTER:  # each time: the line above sets eval mode
            self.checkpointing = checkpoint_activations(self._model)


def mixed_precision(device: torch.device) -> AbstractContextManager[object]:
    """On CUDA, bf16 matrix products on fp32 master weights, except in the head. Else no change.

    The cache of cast weights is off: a weight cast in a pass without gradient would have no
    gradient in the next pass. Casting again costs little.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)


def is_out_of_memory(error: BaseException) -> bool:
    """True if the error is from an allocator: CUDA's, torch's for the CPU, or Python's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return not isinstance(error, OutOfMemoryError)
    return any(phrase in str(error) for phrase in _CPU_ALLOCATOR)


def checkpoint_activations(model: nn.Module) -> bool:
    """Keep only the layers' inputs and recompute the rest. Return False if the model cannot.

    transformers checkpoints layers only in training mode, which would enable dropout. Therefore
    only the layers' own flags are set, not those of the modules inside. The last layer is left
    out: the backward pass starts with it and would recompute its activations at once.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers[:-1]:
        vars(layer).update(
            _gradient_checkpointing_func=partial(checkpoint, use_reentrant=False),
            gradient_checkpointing=True,
            training=True,
        )
    return len(layers) > 1
