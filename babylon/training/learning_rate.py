"""Learning rates that fit the size of a model.

Schulman et al. 2025 ("LoRA Without Regret") fitted the best rates of supervised fine-tuning over
model families: they fall with the hidden size, and LoRA's are ten times higher, whatever its rank.
"""

from transformers import PreTrainedConfig, PreTrainedModel

from babylon.policies.checkpoint_files import adapter_base
from babylon.training.memory_plan import model_config
from babylon.training.trainable import Tuning

_RATE, _SIZE, _EXPONENT = 5e-5, 2000, 0.78  # of all weights, at this hidden size
_LORA = 10.0
_REINFORCEMENT = 0.1  # a gradient of rewards is noisier than one of replies


def supervised_rates(model: PreTrainedModel, tuning: Tuning, steps: int) -> list[float]:
    """Rates of ``steps`` optimiser steps of supervised fine-tuning, falling linearly to zero."""
    return [_fitted(model.config, tuning) * (steps - step) / steps for step in range(steps)]


def reinforcement_rate(model: PreTrainedModel, tuning: Tuning) -> float:
    """First rate of reinforcement learning; the trainer adapts it."""
    return _REINFORCEMENT * _fitted(model.config, tuning)


def first_rate(checkpoint: str, tuning: Tuning) -> float:
    """``reinforcement_rate`` of a checkpoint, without its weights. Blocking.

    Raises:
        ModelError: it has no configuration.
    """
    return _REINFORCEMENT * _fitted(model_config(adapter_base(checkpoint) or checkpoint), tuning)


def _fitted(config: PreTrainedConfig, tuning: Tuning) -> float:
    hidden_size = config.get_text_config().hidden_size
    rate: float = _RATE * (_SIZE / hidden_size) ** _EXPONENT
    return rate * _LORA if tuning == "lora" else rate
