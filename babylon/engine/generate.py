"""The batched sampler: many prompts, one policy, exact token ids and behaviour logprobs.

The longest common prefix of the prompts is prefilled once and its key/value cache repeated for
each row; the rest is left-padded between that prefix and the answer. A row that is done leaves
the batch, so finished rows cost nothing.

A logprob is of the distribution the token was really drawn from: temperature-scaled, and
renormalised over the nucleus when ``top_p < 1`` (vLLM's ``processed_logprobs``). Greedy requests
(temperature 0) draw from a point mass, whose logprobs say nothing: they report those of
temperature 1, and the gateway marks such calls not trainable.

Tokens are drawn by inverting the cumulative distribution at uniforms that each request draws
ahead from its own generator. So the tokens of a seeded request depend neither on the requests
it shares a batch with nor on the device.
"""

import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from babylon.engine.cache import roomy_cache
from babylon.errors import ModelError

FinishReason = Literal["running", "stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to draw. ``temperature`` 0 is greedy; without ``seed`` nothing is reproducible."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or not 0 < self.top_p <= 1:
            raise ValueError(f"{self}: choose max_tokens >= 1 and 0 < top_p <= 1")
        if self.temperature != 0 and not 0.01 <= self.temperature < 100:
            raise ValueError(f"{self}: choose temperature 0 (greedy) or one from 0.01 to 100")


@dataclass(frozen=True, slots=True)
class Request:
    prompt_token_ids: Sequence[int]
    sampling: Sampling

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("a request needs at least one prompt token")


@dataclass(slots=True)
class Completion:
    """``token_ids`` ``[T]`` end with the end-of-sequence token when the policy chose to stop.

    ``finish_reason``: ``stop`` the policy ended, ``length`` it ran into ``max_tokens``,
    ``abort`` the caller's ``on_step`` ended it. It is set after the last token, so another thread
    that reads it first sees the whole answer.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "running"


OnStep = Callable[[Sequence[int], Sequence[Completion]], Collection[int]]
"""(indices of the requests that drew a token, all completions) → indices to end here."""


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    requests: Sequence[Request],
    *,
    eos_token_ids: Collection[int],
    pad_token_id: int,
    on_step: OnStep | None = None,
) -> list[Completion]:
    """Sample one completion a request, all requests in one batch.

    Args:
        model: any causal LM of transformers, in eval mode.
        on_step: called once a step, after the completions grew; the requests it returns end.

    Raises:
        ModelError: the policy's logits are not finite.
    """
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() before sampling")
    completions = [Completion() for _ in requests]
    if not requests:
        return completions
    draw = _Draw(requests, model.device)
    prompts = [request.prompt_token_ids for request in requests]
    logits, cache, mask = _prefill(model, prompts, pad_token_id)
    positions = mask.sum(-1, keepdim=True)
    running = list(range(len(requests)))
    while True:
        tokens, logprobs = draw(logits)
        _record(completions, requests, running, (tokens, logprobs), eos_token_ids)
        for request in on_step(running, completions) if on_step else ():
            if completions[request].finish_reason == "running":
                completions[request].finish_reason = "abort"
        kept = [row for row, r in enumerate(running) if completions[r].finish_reason == "running"]
        if not kept:
            return completions
        if len(kept) < len(running):
            running = [running[row] for row in kept]
            index = torch.tensor(kept, device=model.device)
            cache.batch_select_indices(index)
            draw.keep(index)
            tokens, mask, positions = tokens[index], mask[index], positions[index]
        mask = torch.cat([mask, mask.new_ones(len(running), 1)], dim=-1)
        logits = _forward(model, tokens[:, None], mask, positions, cache)
        positions = positions + 1


class _Draw:
    """The sampling state of the running rows: one temperature, nucleus and uniform stream each."""

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        chosen = [request.sampling for request in requests]
        self.step = 0
        self.uniforms = _uniforms(chosen).to(device)  # [B, longest]
        self.greedy = torch.tensor([s.temperature == 0 for s in chosen], device=device)
        self.temperature = torch.tensor([s.temperature or 1.0 for s in chosen], device=device)
        self.top_p = torch.tensor([s.top_p for s in chosen], device=device)
        self.any_greedy = any(s.temperature == 0 for s in chosen)
        self.any_nucleus = any(s.top_p < 1 for s in chosen)

    def keep(self, index: Tensor) -> None:
        self.uniforms, self.greedy = self.uniforms[index], self.greedy[index]
        self.temperature, self.top_p = self.temperature[index], self.top_p[index]

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, V]`` → one token ``[B]`` a row and its logprob ``[B]``."""
        logprobs = torch.log_softmax(logits.float() / self.temperature[:, None], dim=-1)
        if self.any_nucleus:
            logprobs = _nucleus(logprobs, self.top_p)
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        target = self.uniforms[:, self.step, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
        tokens = tokens.clamp_(max=logits.shape[-1] - 1)
        if self.any_greedy:
            tokens = torch.where(self.greedy, logits.argmax(-1), tokens)
        self.step += 1
        return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def _uniforms(chosen: Sequence[Sampling]) -> Tensor:
    """One row of uniforms in [0, 1) a request: float64 ``[B, longest max_tokens]``, on the CPU."""
    uniforms = torch.zeros(len(chosen), max(s.max_tokens for s in chosen), dtype=torch.float64)
    for row, sampling in enumerate(chosen):
        seed = int.from_bytes(os.urandom(7)) if sampling.seed is None else sampling.seed
        generator = torch.Generator().manual_seed(seed)
        uniforms[row, : sampling.max_tokens].uniform_(generator=generator)
    return uniforms


def _nucleus(logprobs: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of tokens whose probability reaches ``top_p`` ``[B]``; renormalise."""
    ordered, order = logprobs.sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    outside = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    outside[:, 0] = False
    outside = torch.zeros_like(outside).scatter(-1, order, outside)
    return torch.log_softmax(logprobs.masked_fill(outside, float("-inf")), dim=-1)


def _record(
    completions: list[Completion],
    requests: Sequence[Request],
    running: list[int],
    drawn: tuple[Tensor, Tensor],
    eos_token_ids: Collection[int],
) -> None:
    """Append one step (tokens, logprobs) to the running completions; end those that are done."""
    tokens, logprobs = (values.tolist() for values in drawn)
    for request, token, logprob in zip(running, tokens, logprobs, strict=True):
        if not math.isfinite(logprob):
            raise ModelError(f"the policy gave token {token} the logprob {logprob}: load another")
        completion = completions[request]
        completion.token_ids.append(token)
        completion.logprobs.append(logprob)
        if token in eos_token_ids:
            completion.finish_reason = "stop"
        elif len(completion.token_ids) == requests[request].sampling.max_tokens:
            completion.finish_reason = "length"


def _prefill(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], pad_token_id: int
) -> tuple[Tensor, DynamicCache, Tensor]:
    """Prompts → next-token logits ``[B, V]``, their cache, and the attention mask ``[B, T]``."""
    cache = roomy_cache(model.config)
    shared = _common_prefix(prompts)
    longest = max(len(prompt) for prompt in prompts) - shared
    rows, device = len(prompts), model.device
    if shared:
        prefix = torch.tensor([prompts[0][:shared]], device=device)
        positions = torch.arange(shared, device=device)[None]
        _forward(model, prefix, torch.ones_like(prefix), positions, cache)
        cache.batch_repeat_interleave(rows)
    ids = torch.full((rows, longest), pad_token_id)
    mask = torch.zeros(rows, shared + longest, dtype=torch.long)
    mask[:, :shared] = 1
    for row, prompt in enumerate(prompts):
        own = torch.tensor(prompt[shared:])
        ids[row, -len(own) :] = own
        mask[row, -len(own) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(-1) - 1)[:, shared:].clamp(min=0)
    return _forward(model, ids, mask, positions, cache), cache, mask


def _common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Length of the prefix that all prompts share, leaving each at least one token of its own."""
    if len(prompts) == 1:
        return 0
    low, high = min(prompts, key=list), max(prompts, key=list)
    limit = min(len(prompt) for prompt in prompts) - 1
    pairs = zip(low[:limit], high[:limit], strict=False)
    return next((length for length, (a, b) in enumerate(pairs) if a != b), limit)


def _forward(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache
) -> Tensor:
    """Logits ``[B, V]`` after the last of ``ids`` ``[B, S]``; the cache grows by S."""
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = output.logits[:, -1]
    return logits
