"""Logprobs that a checkpoint gives to recorded completions, by the trainer's own forward pass.

Frozen weights are in the trainer's ``precision`` (``BASE_PRECISION``), so that reading a policy
needs no more memory than training its adapter.
"""

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from babylon.core.errors import ModelError
from babylon.core.learning_settings import Precision
from babylon.core.probes import ProbeAnswer
from babylon.core.trajectories import Trajectory
from babylon.policies.load import load_policy
from babylon.training.call_tokens import exact_tokens, within
from babylon.training.grpo.forward import FittingForward, OutOfMemoryError, PolicyForward
from babylon.training.grpo.prefix_tree import PrefixTree, compile_tree
from babylon.training.grpo.ranks import ALONE, logprobs_of_tree
from babylon.training.grpo.training_input import CallTokens


def log_ratios(
    path: Path | str,
    trajectories: Sequence[Trajectory],
    max_tokens: int | None = None,
    precision: Precision = "fp32",
) -> Mapping[str, float]:
    """Trajectory id → log of its probability under ``path`` over that under its behaviour policy.

    The sum over all tokens of all its calls. A trajectory is left out when one of its calls has
    unknown tokens or logprobs, tokens beyond the vocabulary, or was not sampled from the policy
    alone. Blocking.

    Raises:
        ModelError: no policy loads from ``path``, or a forward pass does not fit.
    """
    if not (known := _exact_play(trajectories)):
        return {}
    model, _ = load_policy(path, frozen=True, precision=precision)
    vocabulary = model.config.vocab_size
    ours = {name: own for name, own in known.items() if all(within(c, vocabulary) for c in own)}
    owners = [name for name, own in ours.items() for _ in own]
    if not (calls := [call for own in ours.values() for call in own]):
        return {}
    values = _logprobs(model, compile_tree(calls), max_tokens)
    ratios = dict.fromkeys(owners, 0.0)
    for owner, call, now in zip(owners, calls, values, strict=True):
        assert call.logprobs is not None  # exact_tokens
        ratios[owner] += math.fsum(now) - math.fsum(call.logprobs)
    return ratios


def _exact_play(trajectories: Sequence[Trajectory]) -> dict[str, list[CallTokens]]:
    """Id → tokens of all calls, of the trajectories whose tokens are all known."""
    return {
        one.trajectory_id: exact
        for one in trajectories
        if (exact := [tokens for call in one.calls if (tokens := exact_tokens(call))])
        and len(exact) == len(one.calls)
    }


def _logprobs(
    model: PreTrainedModel, tree: PrefixTree, max_tokens: int | None
) -> list[list[float]]:
    with _own_error():
        rows = logprobs_of_tree(FittingForward(model, max_tokens), tree, ALONE)
    return _of_completions(rows, tree.calls)


def _of_completions(values: Tensor, calls: Sequence[CallTokens]) -> list[list[float]]:
    parts = torch.split(values, [len(call.completion) for call in calls])
    return [part.tolist() for part in parts]


def free_memory() -> None:
    """Free the memory of models that nobody holds, because the next model needs it."""
    gc.collect()  # models contain reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def logprobs_of(
    path: str,
    answers: Sequence[ProbeAnswer],
    max_tokens: int | None,
    precision: Precision = "fp32",
) -> list[float]:
    """Logprobs of every token of every answer, one after the other.

    They are computed in fp32 on every device, if the weights are fp32, but for the products of the
    head, which are TF32 on CUDA.

    Checks of an engine compare them with the engine's own. Blocking; the model's memory is free
    again afterwards.

    Args:
        max_tokens: input tokens of a portion of the forward pass.

    Raises:
        ModelError: the checkpoint does not load, has weights that are not finite, or its forward
            pass does not fit into memory.
    """
    calls = [
        CallTokens(prompt=answer.prompt_token_ids, completion=answer.token_ids, logprobs=None)
        for answer in answers
    ]
    rows = _checked_logprobs(path, calls, max_tokens, precision)
    free_memory()
    return [logprob for row in rows for logprob in row]


def _checked_logprobs(
    path: str, calls: Sequence[CallTokens], max_tokens: int | None, precision: Precision
) -> list[list[float]]:
    tree = compile_tree(calls)

    def attempt(forward: PolicyForward) -> Tensor:
        with torch.autocast("cuda", enabled=False) if precision == "fp32" else nullcontext():
            return forward.logprobs(tree).logprobs

    model, _ = load_policy(path, frozen=True, precision=precision)
    if not all(weight.isfinite().all() for weight in model.parameters()):
        raise ModelError(f"weights of {path} are not finite")
    with _own_error():
        return _of_completions(FittingForward(model, max_tokens).run(attempt), calls)


@contextmanager
def _own_error() -> Iterator[None]:
    """Turn a lack of memory into our error."""
    try:
        yield
    except OutOfMemoryError as error:
        raise ModelError(str(error)) from error
