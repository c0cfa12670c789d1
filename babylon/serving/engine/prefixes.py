"""Beginnings that prompts share, with their keys and values: agents send the same instructions
and the same market again and again, and need not wait until they are read again."""

from collections import OrderedDict, deque
from collections.abc import Sequence

from torch import Tensor

MAX_TOKENS = 4096  # of all prefixes together
MIN_TOKENS = 32  # what is not worth a pass of its own
_SHARERS = 4  # prompts that must have a beginning in common before it is worth a pass
_RECENT = 64  # prompts

Tokens = tuple[int, ...]
Piece = Sequence[Tensor]
"""Keys and values of some tokens, ``[2, heads, T, dim]`` a layer."""


class Prefixes:
    """Of one policy, for keys and values are a policy's own. The last used are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Tokens, Piece] = OrderedDict()
        self._recent: deque[Tokens] = deque(maxlen=_RECENT)

    def longest(self, prompt: Tokens) -> tuple[Piece, int]:
        """What is kept of the prompt's beginning, and how many of its tokens that is. At least one
        token is left, which the policy must read to go on."""
        found = max(self._kept, key=lambda kept: _shared(kept, prompt), default=())
        length = min(_shared(found, prompt), len(prompt) - 1)
        if length < MIN_TOKENS:
            return (), 0
        self._kept.move_to_end(found)
        return self._kept[found], length

    def shared(self, prompts: Sequence[Tokens]) -> list[Tokens]:
        """The longest beginnings of these prompts that enough others have, of these or recent."""
        ordered = sorted([*prompts, *self._recent])
        self._recent.extend(prompts)
        new, found = set(prompts), dict.fromkeys(prompts, 0)
        for start in range(len(ordered) - _SHARERS + 1):  # the first and last share the least
            group = ordered[start : start + _SHARERS]
            length = _shared(group[0], group[-1])
            for prompt in new.intersection(group):
                found[prompt] = max(found[prompt], min(length, len(prompt) - 1))
        return list(dict.fromkeys(prompt[:length] for prompt, length in found.items()))

    def keep(self, prefix: Tokens, piece: Piece) -> None:
        """It also serves every prompt that shares only a part of it."""
        for known in [known for known in self._kept if prefix[: len(known)] == known]:
            del self._kept[known]
        self._kept[prefix] = piece
        while sum(map(len, self._kept)) > MAX_TOKENS:
            self._kept.popitem(last=False)


def _shared(one: Tokens, other: Tokens) -> int:
    """Length of the common beginning, by bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
