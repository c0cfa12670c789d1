"""A key/value cache for continuous batching: rows join, grow and leave.

transformers' ``DynamicCache`` copies all keys and values for every token, which takes most of the
time of a small model. Here a layer writes into a buffer with spare room, so that a step copies only
the new token; attention reads a view of the buffer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from babylon.core.errors import ModelError

_ROOM = 128  # tokens
_SPARE = 8  # rows


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # its base registers classes
    """``keys`` and ``values`` ``[B, heads, T, dim]``, views of a buffer with spare room.

    All rows end in the last column. The columns before a row's first token hold finite values that
    attention must mask.
    """

    keys: Tensor
    values: Tensor
    _buffer: Tensor  # [2, rows, heads, columns, dim], keys and values

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows = self._width = self._end = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        added = key_states.shape[-2]
        self._make_room(self._rows, self._width, added)
        columns = slice(self._end, self._end + added)
        self._buffer[0, : self._rows, :, columns] = key_states
        self._buffer[1, : self._rows, :, columns] = value_states
        self._end += added
        self._show(self._rows, self._width + added)
        return self.keys, self.values

    def add_rows(self, rows: Tensor) -> None:
        """Append rows ``[2, B, heads, T, dim]`` (keys, values)."""
        if not self.is_initialized:
            self.lazy_initialization(rows[0], rows[1])
            self._buffer = rows[:, :0]
        added, width = rows.shape[1], rows.shape[3]
        total, widest = self._rows + added, max(width, self._width)
        self._make_room(total, widest, 0)
        self._buffer[:, self._rows : total, :, self._end - width : self._end] = rows
        self._show(total, widest)

    def drop_row(self, place: int) -> None:
        """Remove a row. The last row moves to its place."""
        columns = slice(self._end - self._width, self._end)
        self._buffer[:, place, :, columns] = self._buffer[:, self._rows - 1, :, columns]
        self._show(self._rows - 1, self._width)

    def narrow(self, width: int) -> None:
        """Keep the last ``width`` columns; release the buffer if there is no row."""
        if self._rows:
            self._show(self._rows, min(width, self._width))
        else:
            self.reset()

    def reset(self) -> None:
        super().reset()
        self._rows = self._width = self._end = 0
        self._buffer = torch.empty(2, 0, 0, 0, 0)

    def _show(self, rows: int, width: int) -> None:
        self._rows, self._width = rows, width
        self.keys, self.values = self._buffer[:, :rows, :, self._end - width : self._end]

    def _make_room(self, rows: int, width: int, added: int) -> None:
        """Grow the buffer to ``rows``, ``width`` columns up to the end and ``added`` after it."""
        _, capacity, heads, columns, dim = self._buffer.shape
        if rows <= capacity and width <= self._end <= columns - added:
            return
        held = self._buffer[:, : self._rows, :, self._end - self._width : self._end]
        # The new size follows the present rows, so the buffer shrinks again after a busy time: a
        # policy that always has rows never reaches ``reset``.
        buffer = held.new_zeros(2, rows + _SPARE, heads, width + added + _ROOM, dim)
        buffer[:, : self._rows, :, width - self._width : width] = held
        self._buffer, self._end = buffer, width


class RoomyCache(DynamicCache):
    """The cache of a whole model.

    Layers with a sliding window keep all tokens too: the model's mask hides those outside.

    Raises:
        ModelError: a layer keeps something other than keys and values.
    """

    layers: list[RoomyLayer]  # type: ignore[assignment]  # the base class allows several kinds

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        for layer in self.layers:
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                kind = type(layer).__name__
                raise ModelError(f"a model of type {config.model_type} has a {kind}: use another")
        self.layers = [RoomyLayer() for _ in self.layers]

    def add_rows(self, cache: DynamicCache, rows: Sequence[int], mask: Tensor) -> None:
        """Copy rows of a cache, without the columns where ``mask`` ``[B, T]`` is 0."""
        own = [mask[row].nonzero()[:, 0] for row in rows]
        columns = torch.zeros(len(rows), max(map(len, own)), dtype=torch.long, device=mask.device)
        for target, source in zip(columns, own, strict=True):
            target[len(target) - len(source) :] = source
        index = torch.tensor(rows, device=mask.device)[:, None]
        for layer, read in zip(self.layers, cache.layers, strict=True):
            both = torch.stack(held(read)).transpose(2, 3)
            layer.add_rows(both[:, index, columns].transpose(2, 3))

    def drop_row(self, place: int) -> None:
        """Remove a row. The last row moves to its place."""
        for layer in self.layers:
            layer.drop_row(place)

    def narrow(self, width: int) -> None:
        """Keep the last ``width`` columns."""
        for layer in self.layers:
            layer.narrow(width)


def held(layer: Any) -> tuple[Tensor, Tensor]:
    """Return the keys and values ``[B, heads, T, dim]`` of a layer that keeps nothing else."""
    return layer.keys, layer.values


def has_window(config: PreTrainedConfig) -> bool:
    """Return True if any layer has a sliding window."""
    return any(DynamicCache(config=config).is_sliding)
