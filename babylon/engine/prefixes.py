"""Beginnings that prompts share, with their keys and values: agents send the same instructions
and the same market again and again, and need not wait until they are read again."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from torch import Tensor

MAX_TOKENS = 4096  # of all prefixes together
MIN_TOKENS = 32  # what is not worth a pass of its own
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

    def shared(self, prompts: Sequence[Tokens]) -> Iterable[Tokens]:
        """For each prompt the most it shares with another of these or of those before."""
        ordered = sorted([*prompts, *self._recent])
        self._recent.extend(prompts)
        common = dict.fromkeys(prompts, 0)
        for one, other in zip(ordered, ordered[1:], strict=False):
            length = _shared(one, other)
            for prompt in {one, other} & common.keys():
                common[prompt] = max(common[prompt], min(length, len(prompt) - 1))
        return dict.fromkeys(prompt[:length] for prompt, length in common.items())

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
