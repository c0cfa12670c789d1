"""CPU time of windows of other shapes: sliding windows, states, deep conversations, one long reply.

    python -m benchmarks.trainer.shapes

Each figure is a ratio of two measurements of one run, in CPU seconds of this process.
"""

import time
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from babylon.training.grpo.forward import Path, PolicyForward
from babylon.training.grpo.prefix_tree import PrefixTree, compile_tree
from babylon.training.grpo.training_input import CallTokens
from benchmarks.trainer.flops import flop, tree_work
from benchmarks.trainer.models import shape_of

VOCABULARY = 512
REPEATS = 3
WIDTHS: dict[int, dict[str, int]] = {
    128: {},
    512: {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}


def model_of(kind: str, **options: Any) -> Any:
    """Four layers of width 128 without ``options``, random weights."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 32_768,
    }
    config = AutoConfig.for_model(kind, **sizes | options)
    return AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]


def tokens(random: Random, count: int) -> list[int]:
    """Random token ids."""
    return [random.randrange(VOCABULARY) for _ in range(count)]


def shared_window() -> list[CallTokens]:
    """Four scenarios of ten agents: 200 system, 500 market, 60 private and 30 reply tokens."""
    random = Random(0)
    system, calls = tokens(random, 200), []
    for _ in range(4):
        market = tokens(random, 500)
        for _ in range(10):
            prompt = system + market + tokens(random, 60)
            calls.append(CallTokens(prompt=prompt, completion=tokens(random, 30), logprobs=None))
    return calls


def conversations(count: int, turns: int, *, rewritten: bool) -> list[CallTokens]:
    """Conversations of 60 observed and 20 answered tokens a turn.

    ``rewritten``: the next prompt holds the reply in other tokens, so each reply is a leaf.
    """
    random = Random(0)
    calls = []
    for _ in range(count):
        said: list[int] = []
        for _ in range(turns):
            said += tokens(random, 60)
            reply = tokens(random, 20)
            calls.append(CallTokens(prompt=list(said), completion=reply, logprobs=None))
            said += tokens(random, 20) if rewritten else reply
    return calls


def seconds(model: Any, tree: PrefixTree, path: Path | None = None) -> float:
    """CPU seconds of one gradient of the tree, the least of some."""
    forward = PolicyForward(model, path=path)
    best = float("inf")
    for _ in range(REPEATS):
        started = time.process_time()
        forward.accumulate(tree, lambda _, values: values.logprobs.sum())
        best = min(best, time.process_time() - started)
        model.zero_grad(set_to_none=True)
    return best


def trained(calls: Sequence[CallTokens]) -> int:
    """Number of completion tokens."""
    return sum(len(call.completion) for call in calls)


def main() -> None:
    """Print the table."""
    calls = shared_window()
    tree = compile_tree(calls)
    flat = sum(len(call.prompt) + len(call.completion) - 1 for call in calls)
    print(f"shared window: {flat / tree.unique_tokens:.1f} flat tokens a unique token")
    slides = ["sliding_attention", "full_attention"] * 2
    kinds: dict[str, dict[str, Any]] = {
        "mistral": {"sliding_window": 256},
        "gemma2": {"sliding_window": 256, "layer_types": slides},
        "granitemoehybrid": {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 384,
            "position_embedding_type": "rope",
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 32,
        },
    }
    for kind, options in kinds.items():
        model = model_of(kind, **options)
        shared, padded = seconds(model, tree), seconds(model, tree, "padded")
        print(f"{kind}: tree {padded / shared:.1f} times as fast as padded batches")
    for width in WIDTHS:
        model = model_of("qwen3", **WIDTHS[width])
        for rewritten in (False, True):
            few, many = (depth_cost(model, *size, rewritten) for size in ((16, 4), (1, 64)))
            name = "rewritten" if rewritten else "kept"
            print(
                f"width {width}, 64 turns, replies {name}: {many[0] / few[0]:.2f} times a token of"
                f" 4 turns, by the operations {many[1] / few[1]:.2f} times"
            )


def depth_cost(model: Any, count: int, turns: int, rewritten: bool) -> tuple[float, float]:
    """CPU seconds and operations of a trained token."""
    calls = conversations(count, turns, rewritten=rewritten)
    work = tree_work(([*call.prompt, *call.completion][:-1] for call in calls), trained(calls))
    took = seconds(model, compile_tree(calls), "piecewise")
    return took / trained(calls), flop(shape_of(model.config), work, "full") / trained(calls)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
