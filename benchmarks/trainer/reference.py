"""The reference gradient: one call at a time, directly from the formula.

At ratio 1 every objective here has the gradient of ``-1/M sum A log pi``, with M trained tokens:
the importance weight and all masks of ours are then 1, and clipping has no effect.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.trainer.cases import Window
from benchmarks.trainer.models import trained_parameters

Gradients = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement of two gradients, with all parameters as one vector."""

    cosine: float
    relative_error: float


def reference_gradient(model: torch.nn.Module, window: Window) -> dict[str, Any]:
    """The gradient of every call on its own, without padding or sharing, summed."""
    for call in window.calls:
        ids = torch.from_numpy(np.concatenate([call.prompt, call.completion]))
        logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
        logprobs = torch.log_softmax(logits[len(call.prompt) - 1 : -1], dim=-1)
        chosen = logprobs.gather(1, ids[len(call.prompt) :, None])
        loss = -call.advantage * chosen.sum() / window.trained_tokens
        loss.backward()  # type: ignore[no-untyped-call]
    return gradients_of(model)


def gradients_of(model: torch.nn.Module) -> dict[str, Any]:
    """fp32 copies of all gradients by canonical name."""
    return {
        name: parameter.grad.detach().float().cpu().numpy().copy()
        for name, parameter in trained_parameters(model)
        if parameter.grad is not None
    }


def agreement(reference: Gradients, other: Gradients) -> Agreement:
    """In fp64.

    Raises:
        ValueError: the two have not the same parameters.
    """
    if reference.keys() != other.keys():
        odd = sorted(reference.keys() ^ other.keys())
        raise ValueError(f"gradients of other parameters than the reference's: {odd[:3]}")
    a = np.concatenate([reference[name].ravel() for name in reference]).astype(np.float64)
    b = np.concatenate([other[name].ravel() for name in reference]).astype(np.float64)
    norm = float(np.linalg.norm(a))
    return Agreement(
        cosine=float(a @ b) / (norm * float(np.linalg.norm(b))),
        relative_error=float(np.linalg.norm(a - b)) / norm,
    )
