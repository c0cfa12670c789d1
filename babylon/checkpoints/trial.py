"""A checkpoint tried in this process: what it answers, and how likely it makes what was answered.

Logprobs are those of training's own forward pass (``babylon.grpo.forward``), but in fp32 also on a
GPU: they are what an engine is measured by.
"""

import gc
from collections.abc import Sequence

import torch

from babylon.engine.generate import Request, Sampling, generate
from babylon.engine.policies import load
from babylon.errors import ModelError
from babylon.grpo.batch import CallTokens
from babylon.grpo.forward import PolicyForward
from babylon.grpo.memory import FittingForward, OutOfMemoryError
from babylon.grpo.tree import compile_tree
from babylon.probes import Answer, Ask

BATCH = 64


def try_out(
    path: str, asks: Sequence[Ask], given: Sequence[Answer], max_tokens: int | None
) -> tuple[list[Answer | None], list[float]]:
    """What a checkpoint answers (None where the prompt does not fit into its context), and its
    logprobs of every token of the ``given`` answers, else of its own. Blocking; the model's memory
    is free again afterwards.

    Raises:
        ModelError: it does not load, cannot answer, or its forward pass does not fit into memory.
    """
    trial = _Trial(path, max_tokens)
    drawn = trial.answers(asks)
    answers = given or [answer for answer in drawn if answer is not None]
    if not answers:
        raise ModelError(f"none of {len(asks)} prompts fits into the context of {path}")
    logprobs = trial.logprobs(answers)
    del trial
    gc.collect()  # a model is a web of cycles, and the next one needs its memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return drawn, logprobs


class _Trial:
    """A loaded checkpoint. ``max_tokens``: of a portion of the forward pass."""

    def __init__(self, path: str, max_tokens: int | None) -> None:
        self._policy = load("trial", path, 0, "cuda" if torch.cuda.is_available() else "cpu")
        self._max_tokens = max_tokens

    def answers(self, asks: Sequence[Ask]) -> list[Answer | None]:
        """One an ask; None where the prompt does not fit into the policy's context."""
        requests = [self._request(ask) for ask in asks]
        fitting = [request for request in requests if request is not None]
        answers = iter(
            [
                answer
                for start in range(0, len(fitting), BATCH)
                for answer in self._batch(fitting[start : start + BATCH])
            ]
        )
        return [None if request is None else next(answers) for request in requests]

    def logprobs(self, answers: Sequence[Answer]) -> list[float]:
        """Of every token of every answer, one after the other."""
        calls = [
            CallTokens(prompt=answer.prompt_token_ids, completion=answer.token_ids, logprobs=None)
            for answer in answers
        ]
        tree = compile_tree(calls)

        def attempt(forward: PolicyForward) -> list[list[float]]:
            with torch.autocast("cuda", enabled=False):
                rows: list[list[float]] = forward.logprobs(tree).logprobs.tolist()
            return rows

        try:
            rows = FittingForward(self._policy.model, self._max_tokens).run(attempt)
        except OutOfMemoryError as error:
            raise ModelError(str(error)) from error
        return [
            x for row, call in zip(rows, calls, strict=True) for x in row[: len(call.completion)]
        ]

    def _batch(self, requests: Sequence[Request]) -> list[Answer]:
        completions = generate(
            self._policy.model,
            requests,
            eos_token_ids=self._policy.eos_token_ids,
            pad_token_id=self._policy.pad_token_id,
        )
        return [
            Answer(
                prompt_token_ids=request.prompt_token_ids,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                text=self._policy.decode(completion.token_ids),
                ended=completion.finish_reason == "stop",
            )
            for request, completion in zip(requests, completions, strict=True)
        ]

    def _request(self, ask: Ask) -> Request | None:
        """As the engine makes it, but shortened where that would refuse what does not fit."""
        prompt = self._policy.prompt(list(ask.messages))
        room = self._policy.context - len(prompt)
        if room < 1:
            return None
        return Request(prompt, Sampling(max_tokens=min(ask.max_tokens, room), seed=ask.seed))
