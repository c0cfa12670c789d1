"""Answers of two policies to the same prompts, from recorded calls."""

from dataclasses import dataclass
from difflib import SequenceMatcher

from babylon.ops.pages.trajectory import shown_text
from babylon.store import Store

PAIRS = 20
_RECENT = 2_000  # newest calls of each policy that are searched for a common prompt

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
    return [
        Pair(
            prompt=shown_text(messages),
            parts=tuple(_parts(first, second)),
            same=first == second,
        )
        for messages, first, second in rows
    ]


_NEWEST = """(SELECT DISTINCT ON (messages) messages, response, started_at FROM (
    SELECT messages, response, started_at FROM babylon.calls WHERE policy_version = ${}
    ORDER BY started_at DESC LIMIT $3) AS newest ORDER BY messages, started_at DESC)"""
_PAIRS = f"""
SELECT messages, a.response, b.response FROM {_NEWEST.format(1)} a
JOIN {_NEWEST.format(2)} b USING (messages)
ORDER BY greatest(a.started_at, b.started_at) DESC LIMIT $4
"""


def _parts(first: str, second: str) -> list[Part]:
    """Compare word by word; a reply is short."""
    before, after = first.split(" "), second.split(" ")
    parts: list[Part] = []
    matcher = SequenceMatcher(a=before, b=after, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            parts.append(("same", " ".join(before[a:b])))
            continue
        parts += [("gone", " ".join(before[a:b]))] if b > a else []
        parts += [("new", " ".join(after[c:d]))] if d > c else []
    return parts
