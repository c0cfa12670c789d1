from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from babylon.training.learning_rate import first_rate, reinforcement_rate, supervised_rates


def sized(hidden_size: int) -> Qwen3ForCausalLM:
    sizes = {"intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=8, hidden_size=hidden_size, **sizes))


def test_rates_follow_the_size_of_the_model(tmp_path: Path) -> None:
    small, large = sized(64), sized(256)
    rates = supervised_rates(small, "full", 4)
    assert rates[0] == pytest.approx(5e-5 * (2000 / 64) ** 0.78)
    assert rates == pytest.approx([rates[0] * left / 4 for left in (4, 3, 2, 1)])
    assert rates[0] / supervised_rates(large, "full", 4)[0] == pytest.approx(4**0.78)
    assert reinforcement_rate(small, "full") == pytest.approx(rates[0] / 10)
    assert reinforcement_rate(small, "lora") == pytest.approx(rates[0])
    small.save_pretrained(tmp_path)
    assert first_rate(str(tmp_path), "lora") == reinforcement_rate(small, "lora")
