"""Replies of a policy to recorded prompts, sampled by the engine that serves it."""

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from babylon.core.errors import ServingError
from babylon.evaluation.arena.engine_players import EngineTable, RefusedCallError
from babylon.evaluation.preferences.choose import DecisionPoint
from babylon.evaluation.preferences.draws import ReplyDraw, SampledReply, by_point
from babylon.serving import pinned_calls

log = logging.getLogger(__name__)


async def engine_replies(
    table: EngineTable, version: int, points: Sequence[DecisionPoint], draws: Sequence[ReplyDraw]
) -> list[list[SampledReply]]:
    """Return the policy's replies to each decision's exact prompt.

    A prompt that the engine does not take has no replies: vLLM's context may be shorter than the
    model's, and a recorded prompt may have tokens of another model.

    Raises:
        ServingError: the engine does not answer, or without token ids.
    """
    refused: set[int] = set()

    async def one(number: int, draw: ReplyDraw) -> SampledReply | None:
        try:
            return await _reply(table, number, version, draw)
        except RefusedCallError:
            refused.add(draw.point)
            return None

    found = await asyncio.gather(*(one(number, draw) for number, draw in enumerate(draws)))
    if refused:
        log.warning(
            "the engine refused %d of %d prompts: if they are too long for it, raise"
            " --max-model-len in VLLM_ARGS",
            len(refused),
            len(points),
        )
    return by_point(points, zip(draws, found, strict=True))


async def _reply(
    table: EngineTable, number: int, version: int, draw: ReplyDraw
) -> SampledReply | None:
    body = {
        "prompt": draw.prompt,
        "max_tokens": draw.max_tokens,
        "temperature": draw.temperature,
        "seed": draw.seed,
        "return_token_ids": True,
    }
    answer = await table.ask(number, version, pinned_calls.TEXTS, body)
    (choice,) = msgspec.json.decode(answer, type=_Completion).choices
    if not choice.token_ids:
        raise ServingError(
            f"policy {version} answers without token ids, with which its replies are trained:"
            " serve it with an engine that takes return_token_ids, as vLLM does"
        )
    if choice.finish_reason != "stop":
        return None
    return SampledReply(token_ids=tuple(choice.token_ids), text=choice.text)


class _Choice(msgspec.Struct):
    text: str
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
