"""Out of memory is no end: the same work again in smaller portions, up to a clear failure."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from babylon.training.grpo.forward import PolicyForward

logger = logging.getLogger(__name__)
T = TypeVar("T")
SMALLEST = 64  # tokens a portion: below it activations are nothing beside the weights
CHECKPOINT_AFTER = 2  # halvings: recomputing every layer costs a third more time, so not at once
_CPU_ALLOCATOR = ("can't allocate memory", "not enough memory")  # torch says it no other way


class OutOfMemoryError(MemoryError):
    """Not even the smallest portion fits."""


class FittingForward:
    """The forward passes of one update, and how small their portions had to become."""

    def __init__(self, model: Any, max_tokens: int | None) -> None:
        self._model = model
        self.halvings = 0
        self.checkpointing = False
        self.forward = PolicyForward(model, max_tokens=max_tokens)

    def run(self, attempt: Callable[[PolicyForward], T]) -> T:
        """``attempt`` until it fits; it starts anew each time.

        Raises:
            OutOfMemoryError: it does not fit with the smallest portions either.
        """
        while True:
            try:
                with mixed_precision(next(self._model.parameters()).device):
                    return attempt(self.forward)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            # here, where the traceback no longer holds the failed attempt's tensors
            self._halve(reason)

    def restore(self, halvings: int) -> None:
        """As small as they were when a progress was saved."""
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
        if self.halvings >= CHECKPOINT_AFTER:  # anew: the line above put all layers in eval mode
            self.checkpointing = checkpoint_activations(self._model)


def mixed_precision(device: torch.device) -> AbstractContextManager[object]:
    """On CUDA, matrix products in bf16 on fp32 master weights (the head's excepted); else nothing.

    Weights are cast anew by every pass, which costs next to nothing: one that a pass without
    gradient had left in the cache would have no gradient in the next.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator gave up: CUDA's, torch's for the CPU, or Python's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return not isinstance(error, OutOfMemoryError)
    return any(phrase in str(error) for phrase in _CPU_ALLOCATOR)


def checkpoint_activations(model: Any) -> bool:
    """Keep only the layers' inputs and compute the rest again; says whether the model can.

    transformers checkpoints layers in training mode alone, which would switch on dropout: so only
    the layers themselves are told to train, not what is inside them. The last layer is left alone:
    the backward pass begins with it, so its activations would be there again at once.
    """
    layers: list[Any] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers[:-1]:
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        layer.gradient_checkpointing = layer.training = True
    return len(layers) > 1
