"""Sampling: requests, completions, and the draw of a token.

A logprob is that of the distribution from which the token was drawn: scaled by temperature, and
renormalised over the nucleus if ``top_p < 1``, and over the tokens that a grammar allows (vLLM's
``processed_logprobs``). Greedy requests (temperature 0) draw from a point mass, whose logprobs
carry no information. They report the logprobs at temperature 1, and the gateway marks such calls as
not trainable.

Tokens are drawn by inverting the cumulative distribution at uniform numbers that each request
draws in advance from its own generator. So the tokens of a seeded request depend neither on the
other requests in the batch nor on the device.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from babylon.serving.engine.grammar import Constraint, mask

FinishReason = Literal["running", "stop", "length", "abort"]
TopLogprobs = list[tuple[int, float]]
"""(token id, logprob), the likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. ``temperature`` 0 is greedy; without ``seed`` a draw is random.

    ``top_logprobs``: number of likeliest tokens to report beside each drawn one.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or not 0 < self.top_p <= 1:
            raise ValueError(f"{self}: choose max_tokens >= 1 and 0 < top_p <= 1")
        if self.temperature != 0 and not 0.01 <= self.temperature < 100:
            raise ValueError(f"{self}: choose temperature 0 (greedy) or one from 0.01 to 100")

    def uniforms(self) -> list[float]:
        """Return one number in [0, 1) for each token that may be drawn."""
        seed = int.from_bytes(os.urandom(7)) if self.seed is None else self.seed
        generator = torch.Generator().manual_seed(seed)
        drawn: list[float] = (
            torch.empty(self.max_tokens, dtype=torch.float64).uniform_(generator=generator).tolist()
        )
        return drawn


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, how to sample, and the grammar of the answer; ``None`` for free text."""

    prompt_token_ids: Sequence[int]
    sampling: Sampling
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("a request needs at least one prompt token")


@dataclass(slots=True, eq=False)
class Completion:
    """The sampled tokens ``[T]``. If the policy stopped, the last is an end-of-sequence token.

    ``top``: the likeliest tokens at each place and their logprobs, as many as the request asks for.
    ``finish_reason``: ``stop``, the policy ended; ``length``, it reached ``max_tokens``; ``abort``,
    the caller set it to end the row, or there is a ``problem``. It is set after the last token, so
    another thread that reads it first sees the whole answer. ``logprobs`` grows last.
    """

    token_ids: list[int] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "running"
    problem: str | None = None


class Drawn(NamedTuple):
    """One token ``[B]`` per row and its logprob ``[B]``; the likeliest tokens of each row."""

    tokens: Tensor
    logprobs: Tensor
    top: list[TopLogprobs] | None


class Draw:
    """Draws one token per row, each row with its own temperature, nucleus and grammar."""

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        rows = [request.sampling for request in requests]
        self._device = device
        self._constraints = {
            row: request.constraint for row, request in enumerate(requests) if request.constraint
        }
        self._tops = [row.top_logprobs for row in rows]
        self._temperature = _column([row.temperature or 1.0 for row in rows], 1.0, device)
        nuclei = [row.top_p if row.temperature else 1.0 for row in rows]
        self._top_p = _column(nuclei, 1.0, device)
        self._greedy = _column([row.temperature == 0 for row in rows], False, device)

    def __call__(self, logits: Tensor, uniforms: Sequence[float]) -> Drawn:
        """Draw from logits ``[B, V]``. Those of constrained rows are changed in place."""
        if self._constraints:
            mask(logits, self._constraints)
        scaled = logits.float() if self._temperature is None else logits.float() / self._temperature
        logprobs = torch.log_softmax(scaled, dim=-1)
        if self._top_p is not None:
            logprobs = _nucleus(logprobs, self._top_p)
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        at = torch.tensor(uniforms, dtype=torch.float64, device=self._device)[:, None]
        tokens = torch.searchsorted(cumulative, at * cumulative[:, -1:], right=True)
        tokens = tokens.clamp_(max=logits.shape[-1] - 1)
        if self._greedy is not None:
            tokens = torch.where(self._greedy, logits.argmax(-1, keepdim=True), tokens)
        top = _likeliest(logprobs, self._tops) if any(self._tops) else None
        return Drawn(tokens[:, 0], logprobs.gather(-1, tokens)[:, 0], top)


def _likeliest(logprobs: Tensor, counts: Sequence[int]) -> list[TopLogprobs]:
    """Return each row's likeliest tokens, without impossible ones."""
    found = logprobs.topk(min(max(counts), logprobs.shape[-1]))
    rows = zip(found.indices.tolist(), found.values.tolist(), counts, strict=True)
    return [
        [(token, score) for token, score in zip(ids[:count], scores, strict=False) if score > -inf]
        for ids, scores, count in rows
    ]


def _column(values: Sequence[float], usual: float, device: torch.device) -> Tensor | None:
    """Return ``[B, 1]``, or ``None`` if all values are the usual one, which changes nothing."""
    return None if set(values) == {usual} else torch.tensor(values, device=device)[:, None]


def _nucleus(logprobs: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of tokens whose probability reaches ``top_p`` ``[B, 1]``, and
    renormalise their logprobs ``[B, V]``."""
    ordered, order = logprobs.sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    outside = (before >= top_p) & (top_p < 1)
    outside[:, 0] = False
    outside = torch.zeros_like(outside).scatter(-1, order, outside)
    return torch.log_softmax(logprobs.masked_fill(outside, float("-inf")), dim=-1)
