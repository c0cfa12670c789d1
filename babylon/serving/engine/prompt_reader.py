"""Forward passes over prompts: many at once, shared prefixes only once."""

from collections import OrderedDict, deque
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from babylon.serving.engine.kv_cache import has_window, held

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


class PromptReader:
    """Computes logits and caches of prompts, and keeps their shared prefixes."""

    def __init__(self, model: PreTrainedModel, pad_token_id: int) -> None:
        self._model, self._pad = model, pad_token_id
        self._prefixes = Prefixes()
        # Padding lies between a prefix and the rest of its prompt. A sliding window would count it.
        self._shares = not has_window(model.config)

    def read(self, prompts: Sequence[Tokens]) -> tuple[Tensor, DynamicCache, Tensor]:
        """Return the logits ``[B, V]`` after each prompt, the cache ``[B, heads, T, dim]`` of all
        prompts, and its mask ``[B, T]``, which is 0 at padding."""
        if self._shares:
            for prefix in self._prefixes.shared(prompts):
                self._remember(prefix)
        return self._read(prompts)

    def _remember(self, prefix: Tokens) -> None:
        if len(prefix) > MAX_TOKENS:
            return
        if len(prefix) - self._prefixes.longest(prefix)[1] >= MIN_TOKENS:
            _, cache, _ = self._read([prefix])
            self._prefixes.keep(prefix, [torch.cat(held(layer)) for layer in cache.layers])

    def _read(self, prompts: Sequence[Tokens]) -> tuple[Tensor, DynamicCache, Tensor]:
        found = [self._prefixes.longest(prompt) for prompt in prompts]
        cache, block = self._from_pieces(found)
        longest = max(
            len(prompt) - known for prompt, (_, known) in zip(prompts, found, strict=True)
        )
        ids = torch.full((len(prompts), longest), self._pad)
        mask = torch.zeros(len(prompts), block + longest, dtype=torch.long)
        positions = torch.zeros_like(ids)
        for row, (prompt, (_, known)) in enumerate(zip(prompts, found, strict=True)):
            own = len(prompt) - known
            ids[row, -own:] = torch.tensor(prompt[known:])
            mask[row, -own:] = 1
            mask[row, block - known : block] = 1
            positions[row, -own:] = torch.arange(known, len(prompt))
        device = self._model.device
        mask = mask.to(device)
        logits = forward(self._model, ids.to(device), positions.to(device), mask, cache)
        return logits, cache, mask

    def _from_pieces(self, found: Sequence[tuple[Piece, int]]) -> tuple[DynamicCache, int]:
        """Return a cache that holds the known prefixes, right-aligned, and its width."""
        cache = DynamicCache()
        block = max(length for _, length in found)
        some = next((piece for piece, length in found if length), ())
        for index, example in enumerate(some):
            _, heads, _, dim = example.shape
            begun = example.new_zeros(2, len(found), heads, block, dim)
            for row, (piece, length) in enumerate(found):
                if length:
                    begun[:, row, :, block - length :] = piece[index][:, :, :length]
            cache.update(begun[0], begun[1], index)
        return cache, block


def forward(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: DynamicCache
) -> Tensor:
    """Return the logits ``[B, V]`` after the last of ``ids`` ``[B, S]``. The cache grows by S.

    ``mask`` ``[B, T]`` is 0 at padding; ``None`` means no padding.
    """
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = output.logits[:, -1]
    return logits
