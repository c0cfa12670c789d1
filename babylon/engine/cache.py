"""A key/value cache with room to grow.

transformers' ``DynamicCache`` copies every key and value at every token, which is most of the
time of a small model. Here a layer writes into a buffer that is larger than what it holds, so a
step costs the new token alone; the attention reads a view.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

_ROOM = 128  # tokens


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # its base registers classes
    """``keys`` and ``values`` ``[B, heads, T, dim]`` are views of buffers with more room in T."""

    _key_buffer: Tensor
    _value_buffer: Tensor

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._key_buffer = key_states[:, :, :0]
            self._value_buffer = value_states[:, :, :0]
        held = self.get_seq_length()
        total = held + key_states.shape[-2]
        if total > self._key_buffer.shape[-2]:
            self._key_buffer = _grown(self._key_buffer, held, total + _ROOM)
            self._value_buffer = _grown(self._value_buffer, held, total + _ROOM)
        self._key_buffer[:, :, held:total] = key_states
        self._value_buffer[:, :, held:total] = value_states
        return self._view(total)

    def batch_repeat_interleave(self, repeats: int) -> None:
        held = self.get_seq_length()
        self._key_buffer = self._key_buffer.repeat_interleave(repeats, dim=0)
        self._value_buffer = self._value_buffer.repeat_interleave(repeats, dim=0)
        self._view(held)

    def batch_select_indices(self, indices: Tensor) -> None:
        held = self.get_seq_length()
        self._key_buffer = self._key_buffer[indices]
        self._value_buffer = self._value_buffer[indices]
        self._view(held)

    def _view(self, length: int) -> tuple[Tensor, Tensor]:
        keys, values = self._key_buffer[:, :, :length], self._value_buffer[:, :, :length]
        self.keys, self.values = keys, values
        return keys, values


def roomy_cache(config: PreTrainedConfig) -> DynamicCache:
    """transformers' cache for this model, its full-attention layers with room to grow."""
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = RoomyLayer()  # type: ignore[no-untyped-call]
    return cache


def _grown(buffer: Tensor, held: int, capacity: int) -> Tensor:
    batch, heads, _, dim = buffer.shape
    grown = torch.empty(batch, heads, capacity, dim, dtype=buffer.dtype, device=buffer.device)
    grown[:, :, :held] = buffer[:, :, :held]
    return grown
