"""Our trainer's use of a GPU: ``python -m benchmarks.trainer --device cuda``, minutes.

Qwen2.5-0.5B tuned in full (fp32 master weights, bf16 autocast) and Qwen2.5-7B by LoRA (bf16 base,
fp32 adapters), random weights, one window of ``long`` calls. Model FLOP utilisation counts every
unique token once: the formula of ``flops`` over time over the device's published dense bf16 peak.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import get_peft_model
from transformers import PreTrainedConfig

from babylon.training.grpo.forward import PolicyForward
from babylon.training.grpo.prefix_tree import compile_tree
from benchmarks.trainer.cases import Window, make_window
from benchmarks.trainer.contenders.babylon_session import WindowLoss, call_tokens, window_work
from benchmarks.trainer.flops import flop, matmul_rate
from benchmarks.trainer.models import (
    GPU_MODELS,
    GRAD_CLIP,
    Tuning,
    build_model,
    lora_config,
    make_optimizer,
    seed_adapter,
    shape_of,
    trained_parameters,
)

PLAN: dict[str, tuple[Tuning, float]] = {  # how it is tuned, and the share aimed at
    "qwen2.5-0.5b": ("full", 0.25),
    "qwen2.5-7b": ("lora", 0.40),
}
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
REPEATS = 5
MAX_TOKENS = 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuResult:
    """One model on one device; seconds are the median iteration."""

    model: str
    tuning: Tuning
    seconds: float
    flop: float
    unique_tokens: int
    flat_tokens: int
    trained_tokens: int
    max_tokens: int
    peak_bytes: int

    def share_of(self, rate: float) -> float:
        return self.flop / self.seconds / rate


def run_cuda(json_file: str | None) -> int:
    """Print the table. Return the exit status, 1 without a CUDA device."""
    if not torch.cuda.is_available():
        print("no CUDA device: run without --device cuda to measure this CPU", file=sys.stderr)
        return 1
    name = torch.cuda.get_device_name()
    measured = matmul_rate(8192, device="cuda", dtype=torch.bfloat16)
    known = [peak for key, peak in PEAKS.items() if key in name]
    peak = known[0] if known else measured
    source = "published" if known else "measured, as no published figure is known here"
    print(
        f"{name}: {peak / 1e12:.0f} TFLOP/s bf16 peak ({source});"
        f" a matrix product of 8192 runs at {measured / 1e12:.0f}\n"
    )
    results = []
    for model, (tuning, aim) in PLAN.items():
        window = make_window("long", vocab=int(GPU_MODELS[model].vocab_size), seed=1)
        result = measure(model, GPU_MODELS[model], tuning, window, device="cuda")
        results.append(result)
        print(line(result, peak, aim), flush=True)
    if json_file:
        models = [asdict(result) for result in results]
        report = {"device": name, "peak": peak, "matmul": measured, "models": models}
        Path(json_file).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def line(result: GpuResult, peak: float, aim: float) -> str:
    return (
        f"{result.model}, {result.tuning}: {result.seconds:.2f} s/iteration,"
        f" {result.unique_tokens / result.seconds:.0f} unique and"
        f" {result.flat_tokens / result.seconds:.0f} flat tok/s,"
        f" {result.peak_bytes / 2**30:.1f} GiB at {result.max_tokens} tokens a portion;"
        f" unique-token MFU {result.share_of(peak):.1%} (aim {aim:.0%})"
    )


def measure(
    name: str,
    config: PreTrainedConfig,
    tuning: Tuning,
    window: Window,
    *,
    device: str,
    repeats: int = REPEATS,
    max_tokens: int = MAX_TOKENS,
) -> GpuResult:
    """Measure the median of ``repeats`` iterations. A warm-up finds a fitting portion."""
    model = _policy(config, tuning, device)
    optimizer = make_optimizer(model)
    tree, loss = compile_tree(call_tokens(window)), WindowLoss(window, device)

    def iterate(tokens: int) -> float:
        _synchronize(device)
        started = time.perf_counter()
        with _autocast(device):
            PolicyForward(model, max_tokens=tokens).accumulate(tree, loss)
        torch.nn.utils.clip_grad_norm_([p for _, p in trained_parameters(model)], GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _synchronize(device)
        return time.perf_counter() - started

    max_tokens = _fitting(iterate, optimizer, max_tokens)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(iterate(max_tokens) for _ in range(repeats))
    work = window_work(window)
    return GpuResult(
        model=name,
        tuning=tuning,
        seconds=seconds,
        flop=flop(shape_of(config), work, tuning),
        unique_tokens=work.tokens,
        flat_tokens=sum(map(len, window.calls)),
        trained_tokens=window.trained_tokens,
        max_tokens=max_tokens,
        peak_bytes=torch.cuda.max_memory_allocated() if device == "cuda" else 0,
    )


def _fitting(
    iterate: Callable[[int], float], optimizer: torch.optim.Optimizer, max_tokens: int
) -> int:
    """Run one iteration, halving the portion until it fits into memory."""
    while True:
        try:
            iterate(max_tokens)
            return max_tokens
        except torch.OutOfMemoryError:
            if max_tokens <= 512:
                raise
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        max_tokens //= 2
        print(f"out of memory: portions of {max_tokens} tokens", file=sys.stderr)


def _policy(config: PreTrainedConfig, tuning: Tuning, device: str) -> torch.nn.Module:
    dtype = torch.float32 if tuning == "full" else torch.bfloat16
    model: torch.nn.Module = build_model(config, 1, device=device, dtype=dtype)
    if tuning == "lora":
        model = get_peft_model(model, lora_config())
        seed_adapter(model, 1)
    return model.eval()


def _autocast(device: str) -> AbstractContextManager[object]:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device == "cuda" else nullcontext()


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
