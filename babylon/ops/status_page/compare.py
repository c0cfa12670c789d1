"""Two policies: what the gate says about them, and their recorded answers to the same prompts."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher

from babylon.ops.pages.trajectory import shown_text
from babylon.ops.pages.window_facts import gate_measure
from babylon.serving.gateway.recording_rules import REDACTED
from babylon.store import Store
from babylon.store.policies import Policy

PAIRS = 20
_RECENT = 2_000  # newest calls of each policy that are searched for a common prompt
# Answers with more words, or pairs of equal words, are shown one after the other.
_MOST_WORDS, _MOST_MATCHES = 1_000, 20_000

Part = tuple[str, str]  # "same", "gone" or "new", and the words


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prompt and both answers; ``parts`` turn the first answer into the second."""

    prompt: str
    parts: tuple[Part, ...]
    same: bool


def which_is_better(one: Policy, other: Policy) -> str:
    """Say in a sentence what the gate found. It compares a policy with its parent only."""
    older, newer = sorted((one, other), key=lambda policy: policy.policy_version)
    names = f"Policy {newer.policy_version}", f"policy {older.policy_version}"
    if newer.parent_version != older.policy_version:
        both = ""
        if newer.parent_version == older.parent_version is not None:
            both = f" Both were compared with policy {newer.parent_version}, in games of their own."
        play = f"babylon arena play --a {older.policy_version} --b {newer.policy_version}"
        return f"{names[0]} and {names[1]} did not meet in a gate. To compare them: {play}.{both}"
    if not newer.verdict:
        return f"{names[0]} was made from {names[1]}. The gate has not compared them yet."
    low, high = (newer.verdict.get(f"pnl_difference_{end}") for end in ("low", "high"))
    if low is None or high is None:
        return f"{names[0]} was made from {names[1]}. The gate decided without a match of both."
    found = "is not shown to be better or worse than"
    if low > 0 or high < 0:
        found = "is better than" if low > 0 else "is worse than"
    gain = f"{low:+.1f} to {high:+.1f} $ a game"
    if gate_measure(newer.verdict) == "mean score":
        gain = f"{low:+.3g} to {high:+.3g} in the task's score"
    return f"{names[0]} {found} {names[1]}: {gain}, with 95 % confidence."


async def read_pairs(store: Store, one: int, other: int) -> list[Pair]:
    """Return the newest prompts that both policies answered."""
    # Different prompts of which the same is left are no common prompt.
    rows = await store.pool.fetch(_PAIRS, one, other, _RECENT, PAIRS, REDACTED)
    return await asyncio.to_thread(lambda: [_pair(*row) for row in rows])


def _pair(messages: str, first: str, second: str) -> Pair:
    return Pair(
        prompt=shown_text(messages), parts=tuple(_parts(first, second)), same=first == second
    )


_NEWEST = """(SELECT DISTINCT ON (messages) messages, response, started_at FROM (
    SELECT messages, response, started_at FROM babylon.calls WHERE policy_version = ${}
    ORDER BY started_at DESC LIMIT $3) AS newest WHERE position($5 IN messages) = 0
    ORDER BY messages, started_at DESC)"""
_PAIRS = f"""
SELECT messages, a.response, b.response FROM {_NEWEST.format(1)} a
JOIN {_NEWEST.format(2)} b USING (messages)
ORDER BY greatest(a.started_at, b.started_at) DESC LIMIT $4
"""


def _parts(first: str, second: str) -> list[Part]:
    """Compare word by word. Blocking: the time grows with the square of the words.

    If an answer says one word again and again, it grows with the cube.
    """
    before, after = first.split(" "), second.split(" ")
    counts = Counter(before)
    longest, matches = max(len(before), len(after)), sum(counts[word] for word in after)
    if (longest > _MOST_WORDS or matches > _MOST_MATCHES) and first != second:
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
