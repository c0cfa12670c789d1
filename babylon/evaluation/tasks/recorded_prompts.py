"""Recorded prompts and a judge, as an evaluator: for tasks that can be neither replayed nor scored.

Each world is a recorded call's prompt that the challenger was not trained on. Both policies reply
to it, and the judge scores each reply. A judge of pairs that sees both replies is not possible
behind this protocol; a judge that sees the prompt, the reply and the recorded reply is its
equivalent: the recorded reply is the common opponent.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import Random
from typing import Any

from babylon.core.llm_calls import Message, tool_call_texts
from babylon.core.trajectories import Call, Trajectory
from babylon.evaluation.tasks.evaluator import Endpoint, PlayScore

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

    def worlds(self, seed: str, count: int, recorded: Sequence[Trajectory]) -> list[Call]:
        """Return at most ``count`` recorded calls, drawn by the seed."""
        calls = [call for trajectory in recorded for call in trajectory.calls]
        return Random(seed).sample(calls, min(count, len(calls)))

    async def play(self, world: Call, policy: Endpoint, seed: int) -> PlayScore:
        """Let the policy reply to the prompt, with the tools of the recorded request."""
        asked: dict[str, Any] = {"messages": [dict(message) for message in world.messages]}
        if world.tools:
            asked["tools"] = list(world.tools)
        answer = await policy.client.chat.completions.create(
            model=policy.model,
            temperature=world.temperature,
            max_tokens=self._max_tokens,
            seed=seed,
            **asked,
        )
        message = answer.choices[0].message.to_dict()
        reply = _text(str(message.get("content") or ""), message.get("tool_calls"))
        value = await self._judge(world.messages, reply, _text(world.response, world.tool_calls))
        return PlayScore(value=value, malformed=not reply)


def _text(content: str, tool_calls: object) -> str:
    """An answer as a judge reads it: its words, then its tool calls as ``name(arguments)``."""
    calls = tool_calls if isinstance(tool_calls, list | tuple) else ()
    return "\n".join(filter(None, [content, *tool_call_texts(calls)]))
