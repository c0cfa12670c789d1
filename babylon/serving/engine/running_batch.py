"""Continuous batching: the rows of one policy are sampled together, one token per row and step.

A row joins when it arrives and leaves when it ends, so no row waits for another. Rows are aligned
at their last token, with padding before the first.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from babylon.core.errors import ModelError
from babylon.serving.engine.kv_cache import RoomyCache, has_window
from babylon.serving.engine.prompt_reader import PromptReader, Tokens, forward
from babylon.serving.engine.sampling import Completion, Draw, Request


@dataclass(slots=True, eq=False)
class Row:
    """A request and its answer so far. Setting ``finish_reason`` ends it at the next step."""

    request: Request
    completion: Completion = field(default_factory=Completion)
    prompt: Tokens = field(init=False)
    uniforms: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = tuple(self.request.prompt_token_ids)
        self.uniforms = self.request.sampling.uniforms()

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.completion.token_ids)

    @property
    def running(self) -> bool:
        return self.completion.finish_reason == "running"


class Batch:
    """Rows of one model, a causal LM of transformers whose layers keep only keys and values.

    Raises:
        ValueError: the model is in training mode.
        ModelError: a layer keeps something other than keys and values.
    """

    def __init__(
        self, model: PreTrainedModel, *, eos_token_ids: Collection[int], pad_token_id: int
    ) -> None:
        if model.training:
            raise ValueError("the model is in training mode: call model.eval() before sampling")
        self._model, self._eos_token_ids = model, eos_token_ids
        self._windowed = has_window(model.config)
        self._reader = PromptReader(model, pad_token_id)
        self._rows: list[Row] = []
        self._cache = RoomyCache(model.config)
        self._draw: Draw | None = None  # for the present rows; None after they changed

    def __len__(self) -> int:
        return len(self._rows)

    @torch.inference_mode()
    def join(self, rows: Sequence[Row]) -> None:
        """Read the prompts and draw the first token of each row.

        Raises:
            ModelError: the policy's logits are not finite.
        """
        logits, cache, mask = self._reader.read([row.prompt for row in rows])
        self._record(rows, self._drawing(rows), logits)
        going_on = [index for index, row in enumerate(rows) if row.running]
        if going_on:
            self._cache.add_rows(cache, going_on, mask)
            self._rows += [rows[index] for index in going_on]
            self._draw = None
        self._settle()

    @torch.inference_mode()
    def step(self) -> None:
        """Draw one token for each row.

        Raises:
            ModelError: the policy's logits are not finite.
        """
        self._settle()
        if not self._rows:
            return
        self._draw = self._draw or self._drawing(self._rows)
        device = self._model.device
        lengths = [row.length for row in self._rows]
        last = torch.tensor([[row.completion.token_ids[-1]] for row in self._rows], device=device)
        positions = torch.tensor(lengths, device=device)[:, None] - 1
        mask = None
        if min(lengths) < max(lengths):
            columns = torch.arange(max(lengths), device=device)
            mask = self._as_attention(columns >= max(lengths) - 1 - positions)
        logits = forward(self._model, last, positions, mask, self._cache)
        self._record(self._rows, self._draw, logits)
        self._settle()

    def _as_attention(self, mask: Tensor) -> Tensor:
        """Return the mask ``[B, T]`` as the additive mask ``[B, 1, 1, T]`` of one query.

        So neither the model nor its layers have to build one. A model with sliding windows builds
        its own and gets ``[B, T]``.
        """
        if self._windowed:
            return mask.long()
        lowest = torch.finfo(self._model.dtype).min
        added = torch.zeros(mask.shape, dtype=self._model.dtype, device=mask.device)
        return added.masked_fill_(~mask, lowest)[:, None, None]

    def _drawing(self, rows: Sequence[Row]) -> Draw:
        return Draw([row.request for row in rows], self._model.device)

    def _record(self, rows: Sequence[Row], draw: Draw, logits: Tensor) -> None:
        """Draw and append a token to each row's completion; set the finish reason at its end."""
        drawn = draw(logits, [row.uniforms[len(row.completion.token_ids)] for row in rows])
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
        if drawn.top:
            for row, top in zip(rows, drawn.top, strict=True):
                if row.request.sampling.top_logprobs:
                    row.completion.top.append(top)
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            if not math.isfinite(logprob):
                raise ModelError(
                    f"the policy gave token {token} the logprob {logprob}: load another policy"
                )
            if constraint := row.request.constraint:
                constraint.advance(token)
                if constraint.problem:  # the token is no answer
                    row.completion.problem = constraint.problem
                    row.completion.finish_reason = "abort"
                    continue
            row.completion.token_ids.append(token)
            row.completion.logprobs.append(logprob)
            if token in self._eos_token_ids:
                row.completion.finish_reason = "stop"
            elif len(row.completion.token_ids) == row.request.sampling.max_tokens:
                row.completion.finish_reason = "length"

    def _settle(self) -> None:
        """Remove the rows that have ended, and columns that no row needs."""
        for place in reversed(range(len(self._rows))):
            if not self._rows[place].running:
                self._rows[place] = self._rows[-1]
                self._rows.pop()
                self._cache.drop_row(place)
                self._draw = None
        self._cache.narrow(max((row.length - 1 for row in self._rows), default=0))


def generate(
    model: PreTrainedModel,
    requests: Sequence[Request],
    *,
    eos_token_ids: Collection[int],
    pad_token_id: int,
) -> list[Completion]:
    """Sample one completion per request, all in one batch.

    Args:
        model: a causal LM of transformers whose layers keep only keys and values, in eval mode.

    Raises:
        ModelError: the policy's logits are not finite.
    """
    batch = Batch(model, eos_token_ids=eos_token_ids, pad_token_id=pad_token_id)
    rows = [Row(request) for request in requests]
    if rows:
        batch.join(rows)
    while len(batch):
        batch.step()
    return [row.completion for row in rows]
