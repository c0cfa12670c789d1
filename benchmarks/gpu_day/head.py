"""The own head beside fused linear-cross-entropy: time, memory and error of the gradient.

Liger (``liger-kernel``, arXiv 2410.10989) and Cut Cross-Entropy (``cut-cross-entropy``, arXiv
2411.09009) are measured where they are installed. Neither gives the log-probability of each token
and the entropy in one pass with weights a token, which the losses need.
"""

import importlib
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from babylon.training.grpo.tree_forward import token_values

Gradient = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # hidden [M, h], weight [V, h], y [M] → [M, h]
REPEATS = 3


def measure_heads(*, rehearse: bool) -> dict[str, object]:
    """Measure every head on one frozen weight: a 7B model's on CUDA, a tiny one for a rehearsal."""
    rows, width, vocabulary = (64, 32, 512) if rehearse else (4096, 3584, 152_064)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    hidden, weight = normal(rows, width), normal(vocabulary, width) / width**0.5
    target = torch.randint(vocabulary, (rows,), generator=generator, device=device)
    exact = _own(torch.float32, hidden, weight, target)
    figures: dict[str, object] = {}
    for name, gradient in _heads(device).items():
        try:
            figures |= _measured(name, gradient, hidden, weight, target, exact)
        except ImportError as error:
            figures[name] = f"not installed ({error.name})"
    return figures


def _heads(device: str) -> dict[str, Gradient]:
    heads: dict[str, Gradient] = {
        "fp32": partial(_own, torch.float32),
        "bf16": partial(_own, torch.bfloat16),
        "liger": _liger,
    }
    if device == "cuda":  # both need its kernels
        heads |= {"tf32": _tf32, "cce": _cut_cross_entropy}
    return heads


def _measured(
    name: str, gradient: Gradient, hidden: Tensor, weight: Tensor, target: Tensor, exact: Tensor
) -> dict[str, object]:
    found, seconds = gradient(hidden, weight, target), []
    if hidden.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if hidden.is_cuda else 0
    for _ in range(REPEATS):
        started = time.perf_counter()
        gradient(hidden, weight, target)
        if hidden.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() - held if hidden.is_cuda else 0
    return {
        f"{name}_ms": 1e3 * min(seconds),
        f"{name}_peak_mib": peak / 2**20,
        f"{name}_error": float((found - exact).norm() / exact.norm()),
    }


def _own(dtype: torch.dtype, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    given, head = hidden.detach().requires_grad_(), weight.to(dtype)
    row = torch.arange(len(given), device=given.device)
    logprobs, _ = token_values(
        lambda chunk: chunk.to(dtype) @ head.T,
        len(weight),
        given,
        torch.ones_like(given[:, 0]),
        row,
        target,
    )
    return _gradient(logprobs.sum(), given)


def _tf32(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return _own(torch.float32, hidden, weight, target)
    finally:
        torch.set_float32_matmul_precision(before)


def _liger(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    module = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    given = hidden.detach().requires_grad_()
    loss = module.LigerFusedLinearCrossEntropyLoss(reduction="sum")
    return _gradient(-loss(weight.bfloat16(), given.bfloat16(), target).float(), given)


def _cut_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    module = importlib.import_module("cut_cross_entropy")
    given = hidden.detach().requires_grad_()
    loss = module.linear_cross_entropy(given.bfloat16(), weight.bfloat16(), target, reduction="sum")
    return _gradient(-loss.float(), given)


def _gradient(total: Tensor, given: Tensor) -> Tensor:
    total.backward()  # type: ignore[no-untyped-call]
    assert given.grad is not None  # it is a leaf
    return given.grad
