"""Recorded prompts and a judge, as an evaluator: for tasks that can be neither replayed nor scored.

A world is some recorded prompts of one scenario, of an hour on which the challenger's line was not
trained: who has learned by heart what was right in a scenario would gain there and nowhere else.
Both policies reply to them, and the judge scores each reply. Prompts of one scenario resemble each
other, so together they are one piece of evidence. A judge of pairs that sees both replies is not
possible behind this protocol; a judge that sees the prompt, the reply and the recorded reply is its
equivalent: the recorded reply is the common opponent.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import Random
from statistics import fmean
from typing import Any

from openai import BadRequestError

from babylon.core.llm_calls import Message, tool_call_texts
from babylon.core.trajectories import Call, Trajectory
from babylon.evaluation.tasks.evaluator import Endpoint, PlayScore, exceeds_context

log = logging.getLogger(__name__)
PROMPTS = 8  # of a scenario, at most
ReplyJudge = Callable[[Sequence[Message], str, str], Awaitable[float]]
"""(messages, reply, recorded reply) → 0 (the recorded one is better) to 1 (the reply is)."""


class RecordedPrompts:
    """An evaluator of single replies.

        from my_judge import prefers      # async, a ``ReplyJudge``
        evaluator = RecordedPrompts(prefers)

    A failing judge must raise: its error fails the gate, and is no low score.
    """

    unit, lowest, highest = "share of replies preferred to the recorded ones", 0.0, 1.0

    def __init__(self, judge: ReplyJudge, *, max_tokens: int = 256) -> None:
        self.guardrails: Mapping[str, float] = {}
        self._judge, self._max_tokens = judge, max_tokens

    def worlds(self, seed: str, count: int, recorded: Sequence[Trajectory]) -> list[list[Call]]:
        """Return at most ``PROMPTS`` calls of each of at most ``count`` scenarios."""
        random, calls = Random(seed), dict[tuple[str, str], list[Call]]()
        for one in recorded:
            calls.setdefault((one.window_id, one.scenario_id), []).extend(one.calls)
        worlds = [random.sample(own, min(PROMPTS, len(own))) for own in calls.values() if own]
        return random.sample(worlds, min(count, len(worlds)))

    async def play(self, world: Sequence[Call], policy: Endpoint, seed: int) -> PlayScore:
        """Let the policy reply to the prompts. The value is the mean over those that fit.

        A prompt that fills the context fits neither policy.
        """
        replied = [await self._reply(call, policy, seed) for call in world]
        found = [one for one in replied if one is not None]
        if len(found) < len(replied):
            left_out = len(replied) - len(found)
            log.warning("%d of %d recorded prompts exceed the context", left_out, len(replied))
        if not found:  # for both policies, so that the world decides nothing
            return PlayScore(value=self.lowest)
        return PlayScore(
            value=fmean(value for value, _ in found), malformed=any(empty for _, empty in found)
        )

    async def _reply(self, call: Call, policy: Endpoint, seed: int) -> tuple[float, bool] | None:
        """Reply with the tools of the recorded request. Return the judge's score and if empty."""
        asked: dict[str, Any] = {"messages": [dict(message) for message in call.messages]}
        if call.tools:
            asked["tools"] = list(call.tools)
        try:
            answer = await policy.client.chat.completions.create(
                model=policy.model,
                temperature=call.temperature,
                max_tokens=self._max_tokens,
                seed=seed,
                **asked,
            )
        except BadRequestError as error:
            if exceeds_context(error):
                return None
            raise
        message = answer.choices[0].message.to_dict()
        reply = _text(str(message.get("content") or ""), message.get("tool_calls"))
        recorded = _text(call.response, call.tool_calls)
        return await self._judge(call.messages, reply, recorded), not reply


def _text(content: str, tool_calls: object) -> str:
    """An answer as a judge reads it: its words, then its tool calls as ``name(arguments)``."""
    calls = tool_calls if isinstance(tool_calls, list | tuple) else ()
    return "\n".join(filter(None, [content, *tool_call_texts(calls)]))
