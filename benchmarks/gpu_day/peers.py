"""One pass over a window on a GPU: ours beside TRL's, packed into prefix trees and flat.

All have the same random weights, the default loss and bf16 matrix products. TRL is measured where
it is installed. Its tree packing (``trl.experimental.async_grpo``) fetches FlashAttention 3 from a
hub; here it runs with FlashAttention 2, as ``torch.nn.attention.varlen``.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor

from babylon.training.grpo.attention.paths import Paths, segments_attend
from babylon.training.grpo.forward import FittingForward, PolicyForward
from babylon.training.grpo.portion_size import CUDA_PORTION_TOKENS
from babylon.training.grpo.prefix_tree import compile_tree
from babylon.training.likelihood import free_memory
from benchmarks.gpu_day.models import PolicyKind, window_of
from benchmarks.trainer.cases import Call, Window
from benchmarks.trainer.contenders.babylon_session import WindowLoss, call_tokens
from benchmarks.trainer.models import build_model, lora_config, seed_adapter, trained_parameters

REPEATS = 2
FLAT_PART = 6  # of the calls, one in so many is timed flat, where time is linear in calls
FLAT_CALLS = 4  # a micro-batch
CLIP = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A policy, and a function that adds the window's gradient to it."""

    model: torch.nn.Module
    accumulate: Callable[[], object]


def measure_peers(kind: PolicyKind, *, rehearse: bool) -> dict[str, object]:
    """Measure a pass of each trainer, forward and backward. The window is compiled before."""
    window = window_of(kind, rehearse=rehearse)
    portion = 1024 if rehearse else CUDA_PORTION_TOKENS
    figures, ours = _measured("ours", lambda: _ours(kind, window))
    if importlib.util.find_spec("trl") is None:
        return figures | {"trl": "not installed"}
    found, theirs = _measured("trl_tree", lambda: _packed(kind, window, portion))
    figures |= found
    share = 1 if rehearse else FLAT_PART
    flat, _ = _measured("trl_flat", lambda: _flat(kind, window.head(len(window.calls) // share)))
    figures |= flat | {"trl_flat_s": share * flat["trl_flat_s"]}
    return {
        **figures,
        "trl_tree_over_ours": figures["trl_tree_s"] / figures["ours_s"],
        "trl_flat_over_ours": figures["trl_flat_s"] / figures["ours_s"],
        "gradient_gap": float((ours - theirs).norm() / theirs.norm()),
    }


def _measured(name: str, open_pass: Callable[[], Pass]) -> tuple[dict[str, float], Tensor]:
    """Return the median time and the peak memory, and the gradient ``[P]`` on the CPU.

    The first pass compiles kernels and finds the portion that fits.
    """
    free_memory()
    one, seconds = open_pass(), []
    for repeat in range(REPEATS + 1):
        if repeat == 1 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        one.model.zero_grad(set_to_none=True)
        started = time.perf_counter()
        one.accumulate()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    gradients = sorted((n, p.grad) for n, p in trained_parameters(one.model) if p.grad is not None)
    whole = torch.cat([gradient.float().flatten().cpu() for _, gradient in gradients])
    found = {
        f"{name}_first_s": seconds[0],
        f"{name}_s": statistics.median(seconds[1:]),
        f"{name}_peak_gib": peak / 2**30,
    }
    print(found, flush=True)  # the next one may fail
    return found, whole


def _policy(kind: PolicyKind, attention: str = "", *, fused_head: bool = False) -> Any:
    """Random weights on the device, with an adapter where one is tuned."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if kind.precision == "fp32" else torch.bfloat16
    model: Any = build_model(kind.config, 1, device=device, dtype=dtype)
    if attention:
        model.set_attn_implementation(attention)
    if fused_head:
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if kind.tuning == "lora":
        model = get_peft_model(model, lora_config())
        seed_adapter(model, 1)
    return model


def _ours(kind: PolicyKind, window: Window) -> Pass:
    model = _policy(kind)
    tree, fitting = compile_tree(call_tokens(window)), FittingForward(model, None)
    loss = WindowLoss(window, next(model.parameters()).device.type)

    def attempt(forward: PolicyForward) -> None:
        model.zero_grad(set_to_none=True)
        forward.accumulate(tree, loss)

    return Pass(model=model, accumulate=lambda: fitting.run(attempt))


def _packed(kind: PolicyKind, window: Window, budget: int) -> Pass:
    """TRL's rows of a prefix tree each, and its head, which scores labelled positions only."""
    from trl.experimental.async_grpo import packing

    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=_varlen)
    packing.register_tree_attention()
    model = _recomputing(_policy(kind, packing.TREE_ATTENTION, fused_head=True), kind)
    device = next(model.parameters()).device
    rows = [packing.TreeRow()]
    for call in window.calls:
        sample = _sample(call)
        if not rows[-1].fits(sample, budget):
            rows.append(packing.TreeRow())
        rows[-1].add(sample)
    batches = [{name: t.to(device) for name, t in row.pack().items()} for row in rows]

    def accumulate() -> None:
        for batch in batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                output = _tree_output(model, batch)
            ratio = (output.log_probs[0, batch["token_index"]] - batch["old_log_probs"]).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            advantage = batch["advantages"]
            loss = -torch.min(ratio * advantage, clipped * advantage).sum()
            (loss / window.trained_tokens).backward()

    return Pass(model=model, accumulate=accumulate)


def _sample(call: Call) -> dict[str, Any]:
    assert call.mu is not None
    prompt = torch.zeros(len(call.prompt))
    return {
        "input_ids": torch.tensor([*call.prompt, *call.completion]),
        "completion_mask": torch.cat([prompt, torch.ones(len(call.completion))]).long(),
        "old_log_probs": torch.cat([prompt, torch.from_numpy(call.mu)]),
        "advantage": call.advantage,
        "group_id": 0,
    }


def _tree_output(model: Any, batch: dict[str, Tensor]) -> Any:
    longest = batch["tree_max_seqlens"].tolist()
    return model(
        input_ids=batch["input_ids"][None],
        position_ids=batch["position_ids"][None],
        shift_labels=batch["shift_labels"][None],
        fused_lm_head=True,
        tree_kv_index=batch["tree_kv_index"],
        tree_cu_seqlens_q=batch["tree_cu_seqlens_q"],
        tree_cu_seqlens_k=batch["tree_cu_seqlens_k"],
        tree_max_seqlen_q=longest[0],
        tree_max_seqlen_k=longest[1],
    )


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_key: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: Sequence[int],
) -> Tensor:
    assert causal and tuple(window_size) == (-1, -1)
    paths = Paths(
        keys=torch.empty(0),  # copied already
        query_starts=starts,
        key_starts=key_starts,
        longest_segment=longest,
        longest_path=longest_key,
    )
    return segments_attend(query, key, value, paths, softmax_scale)


def _flat(kind: PolicyKind, window: Window) -> Pass:
    """TRL's GRPOTrainer, unmodified: every call alone."""
    from benchmarks.trainer.contenders.trl_session import logged_trainer

    model = _recomputing(_policy(kind), kind)
    cuda = next(model.parameters()).is_cuda
    steps = len(window.calls) // FLAT_CALLS
    trainer = logged_trainer(
        model,
        torch.optim.SGD([p for _, p in trained_parameters(model)]),  # never steps
        replace(window, calls=window.calls[: steps * FLAT_CALLS]),
        steps=steps,
        gradient_checkpointing=kind.tuning == "lora",
        bf16=cuda,
        use_cpu=not cuda,
    )

    def accumulate() -> None:
        for step in range(steps):
            trainer._step = steps + step  # at 0 it would generate, that is shuffle, anew
            with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
                trainer.training_step(trainer.model, trainer.window.calls, None)

    return Pass(model=model, accumulate=accumulate)


def _recomputing(model: Any, kind: PolicyKind) -> Any:
    """Large models recompute activations, as TRL's do by default. They have no dropout."""
    if kind.tuning == "lora":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()
