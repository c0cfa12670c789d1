"""Cache of shared prompt prefixes with their keys and values.

Agents send the same instructions and the same market repeatedly. A cached prefix is not computed
again.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from torch import Tensor

MAX_TOKENS = 4096  # of all prefixes together
MIN_TOKENS = 32  # a shorter prefix is not worth a forward pass of its own
_SHARERS = 4  # prompts that must share a prefix before it is computed by itself
_RECENT = 64  # prompts that are remembered to find shared prefixes

Tokens = tuple[int, ...]
Piece = Sequence[Tensor]
"""Keys and values of some tokens, one ``[2, heads, T, dim]`` per layer."""


class Prefixes:
    """Prefixes of one policy's prompts. The least recently used are dropped."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Tokens, Piece] = OrderedDict()
        self._recent: deque[Tokens] = deque(maxlen=_RECENT)

    def longest(self, prompt: Tokens) -> tuple[Piece, int]:
        """Return the longest cached prefix of a prompt, and its length in tokens.

        At least one prompt token is left: its forward pass gives the logits of the first answer
        token.
        """
        found = max(self._kept, key=lambda kept: _shared(kept, prompt), default=())
        length = min(_shared(found, prompt), len(prompt) - 1)
        if length < MIN_TOKENS:
            return (), 0
        self._kept.move_to_end(found)
        return self._kept[found], length

    def shared(self, prompts: Sequence[Tokens]) -> list[Tokens]:
        """Return the longest prefixes that enough of these and of recent prompts share."""
        ordered = sorted([*prompts, *self._recent])
        self._recent.extend(prompts)
        new, found = set(prompts), dict.fromkeys(prompts, 0)
        # In sorted order, prompts with a common prefix are neighbours, and the first and the last
        # of a group share the shortest prefix.
        for start in range(len(ordered) - _SHARERS + 1):
            group = ordered[start : start + _SHARERS]
            length = _shared(group[0], group[-1])
            for prompt in new.intersection(group):
                found[prompt] = max(found[prompt], min(length, len(prompt) - 1))
        return list(dict.fromkeys(prompt[:length] for prompt, length in found.items()))

    def keep(self, prefix: Tokens, piece: Piece) -> None:
        """Cache a prefix. It replaces cached prefixes that it begins with."""
        for known in [known for known in self._kept if prefix[: len(known)] == known]:
            del self._kept[known]
        self._kept[prefix] = piece
        while sum(map(len, self._kept)) > MAX_TOKENS:
            self._kept.popitem(last=False)


def _shared(one: Tokens, other: Tokens) -> int:
    """Return the length of the common prefix, by bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
