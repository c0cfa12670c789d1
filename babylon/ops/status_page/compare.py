"""Answers of two policies to the same prompts, from recorded calls."""

import asyncio
from dataclasses import dataclass
from difflib import SequenceMatcher

from babylon.ops.pages.trajectory import shown_text
from babylon.store import Store

PAIRS = 20
_RECENT = 2_000  # newest calls of each policy that are searched for a common prompt
_MOST_WORDS = 1_000  # longer answers are shown one after the other

Part = tuple[str, str]  # "same", "gone" or "new", and the words


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prompt and both answers; ``parts`` turn the first answer into the second."""

    prompt: str
    parts: tuple[Part, ...]
    same: bool


async def read_pairs(store: Store, one: int, other: int) -> list[Pair]:
    """Return the newest prompts that both policies answered."""
    rows = await store.pool.fetch(_PAIRS, one, other, _RECENT, PAIRS)
    return await asyncio.to_thread(lambda: [_pair(*row) for row in rows])


def _pair(messages: str, first: str, second: str) -> Pair:
    return Pair(
        prompt=shown_text(messages), parts=tuple(_parts(first, second)), same=first == second
    )


_NEWEST = """(SELECT DISTINCT ON (messages) messages, response, started_at FROM (
    SELECT messages, response, started_at FROM babylon.calls WHERE policy_version = ${}
    ORDER BY started_at DESC LIMIT $3) AS newest ORDER BY messages, started_at DESC)"""
_PAIRS = f"""
SELECT messages, a.response, b.response FROM {_NEWEST.format(1)} a
JOIN {_NEWEST.format(2)} b USING (messages)
ORDER BY greatest(a.started_at, b.started_at) DESC LIMIT $4
"""


def _parts(first: str, second: str) -> list[Part]:
    """Compare word by word. Blocking: the time grows with the square of the words."""
    before, after = first.split(" "), second.split(" ")
    if max(len(before), len(after)) > _MOST_WORDS and first != second:
        return [("gone", shown_text(first)), ("new", shown_text(second))]
    parts: list[Part] = []
    matcher = SequenceMatcher(a=before, b=after, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            parts.append(("same", " ".join(before[a:b])))
            continue
        parts += [("gone", " ".join(before[a:b]))] if b > a else []
        parts += [("new", " ".join(after[c:d]))] if d > c else []
    return parts
