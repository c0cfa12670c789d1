"""Portions from the free memory of a GPU that is not there."""

from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers import Gemma3nTextConfig, Qwen3Config

from babylon.training.grpo.portion_size import active_width, layer_bytes, tokens_in_memory


def test_memory_is_that_of_the_models_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's allocator holds and does not use is free; moments and gradient are not."""
    config = Qwen3Config(hidden_size=8, intermediate_size=16, num_hidden_layers=2)
    weight = Mock(dtype=torch.float32, device=torch.device("cuda:1"), is_cuda=True)
    weight.numel.return_value = 100
    model = Mock(**{"parameters.return_value": [weight]})
    for name, found in (
        ("memory_reserved", {0: 0, 1: 500}),
        ("memory_allocated", {0: 0, 1: 100}),
        ("mem_get_info", {0: (10**9, 10**9), 1: (2000, 10**9)}),
    ):
        monkeypatch.setattr(
            torch.cuda, name, lambda device=None, found=found: found[getattr(device, "index", 0)]
        )
    layer = 12 * 8 * 4 + 4 * 16 * 2
    assert layer_bytes(config, torch.float32) == layer
    assert tokens_in_memory(model, config) == (2000 + 400 - 12 * 100) / (2 * layer)
    weight.requires_grad = False
    assert tokens_in_memory(model, config) == 2400 / (2 * layer)
    assert tokens_in_memory(nn.Linear(2, 2), config) == 0


def test_a_width_for_each_layer_counts_as_the_widest() -> None:
    config = Gemma3nTextConfig(num_hidden_layers=3, intermediate_size=[8, 32, 16])
    assert active_width(config) == 32
