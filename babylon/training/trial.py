"""How likely a checkpoint makes what was answered: what an engine is measured by.

Logprobs are those of training's own forward pass (``babylon.training.grpo.forward``), but in fp32
also on a GPU.
"""

import gc
from collections.abc import Sequence

import torch

from babylon.core.errors import ModelError
from babylon.core.probes import ProbeAnswer
from babylon.policies.load import load_policy
from babylon.training.grpo.forward import PolicyForward
from babylon.training.grpo.memory import FittingForward, OutOfMemoryError
from babylon.training.grpo.prefix_tree import compile_tree
from babylon.training.grpo.training_input import CallTokens


def logprobs_of(path: str, answers: Sequence[ProbeAnswer], max_tokens: int | None) -> list[float]:
    """Of every token of every answer, one after the other. Blocking; the model's memory is free
    again afterwards.

    Args:
        max_tokens: of a portion of the forward pass.

    Raises:
        ModelError: it does not load, has weights that are no numbers, or its forward pass does not
            fit into memory.
    """
    calls = [
        CallTokens(prompt=answer.prompt_token_ids, completion=answer.token_ids, logprobs=None)
        for answer in answers
    ]
    rows = _forward(path, calls, max_tokens)
    gc.collect()  # a model is a web of cycles, and the next one needs its memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return [x for row, call in zip(rows, calls, strict=True) for x in row[: len(call.completion)]]


def _forward(path: str, calls: Sequence[CallTokens], max_tokens: int | None) -> list[list[float]]:
    tree = compile_tree(calls)

    def attempt(forward: PolicyForward) -> list[list[float]]:
        with torch.autocast("cuda", enabled=False):
            rows: list[list[float]] = forward.logprobs(tree).logprobs.tolist()
        return rows

    model, _ = load_policy(path, frozen=True)
    if not all(weight.isfinite().all() for weight in model.parameters()):
        raise ModelError(f"weights of {path} are not finite")
    try:
        return FittingForward(model, max_tokens).run(attempt)
    except OutOfMemoryError as error:
        raise ModelError(str(error)) from error
