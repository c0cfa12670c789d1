"""Draws of replies to recorded prompts, made by the engine or by a model in this process."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from babylon.evaluation.preferences.choose import DecisionPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyDraw:
    """One reply to the exact prompt of the decision number ``point``, with a seed of its own."""

    point: int
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledReply:
    """A reply's tokens with the end token, and its text."""

    token_ids: tuple[int, ...]
    text: str


def draws_of(
    points: Sequence[DecisionPoint], count: int, temperature: float, seed: int, context: int | None
) -> list[ReplyDraw]:
    """Return ``count`` draws for each decision whose prompt leaves room in the ``context``.

    A reply may be half as long again as the longest recorded one. Draws of a decision have the same
    seeds each time, whatever other decisions are asked for.
    """
    # The call's own limit is not recorded; a reply that is cut off would be a worse one by chance.
    longest = max(len(p.call.completion_token_ids or ()) for p in points) if points else 0
    budget = max(16, longest * 3 // 2)
    draws = []
    for number, point in enumerate(points):
        prompt = tuple(point.call.prompt_token_ids or ())
        room = budget if context is None else min(budget, context - len(prompt))
        for draw in range(count if room > 0 else 0):
            name = f"{seed}:{point.trajectory_id}:{point.call.step}:{draw}"
            own = int.from_bytes(blake2b(name.encode(), digest_size=7).digest())
            draws.append(
                ReplyDraw(
                    point=number,
                    prompt=prompt,
                    max_tokens=room,
                    temperature=temperature,
                    seed=own,
                )
            )
    return draws


def by_point(
    points: Sequence[DecisionPoint], found: Iterable[tuple[ReplyDraw, SampledReply | None]]
) -> list[list[SampledReply]]:
    """Return each decision's replies. None: it did not end in time, or could not be drawn."""
    replies: list[list[SampledReply]] = [[] for _ in points]
    for draw, reply in found:
        if reply is not None:
            replies[draw.point].append(reply)
    return replies
