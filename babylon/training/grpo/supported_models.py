"""Models that can run on a prefix tree: causal LMs of transformers with standard attention."""

import inspect
from typing import cast

from peft import PeftModel
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

_LENGTH_DEPENDENT = {"dynamic", "longrope"}


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a peft model, or the model itself."""
    return cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)


def why_unsupported(model: nn.Module) -> str | None:
    """The reason why a prefix tree can give this model wrong values, or None."""
    adapters = model.peft_config.values() if isinstance(model, PeftModel) else ()
    kinds = {str(c.peft_type.value) for c in adapters}
    if kinds - {"LORA"}:
        return f"its {', '.join(sorted(kinds))} adapter is not LoRA"
    if not isinstance(model := causal_lm(model), PreTrainedModel):
        return f"{type(model).__name__} is not a model of transformers"
    config = model.config
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if not model._supports_attention_backend:
        return f"{type(model).__name__} does not use transformers' attention registry"
    if model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        return f"{type(model).__name__} has no language-model head"
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    if kinds:
        return f"it has layers of type {', '.join(sorted(kinds))}"
    if not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None):
        return f"its attention slides over {config.sliding_window} tokens"
    return _why_layers_unsupported(model.base_model, config)


def _why_layers_unsupported(backbone: nn.Module, config: PreTrainedConfig) -> str | None:
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotation in _LENGTH_DEPENDENT:
        return f"its {rotation} rotary embedding depends on the longest call of a batch"
    layers = getattr(backbone, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not layers:
        return f"{type(backbone).__name__} has no .layers"
    parameters = inspect.signature(layers[-1].forward).parameters.values()
    names = {parameter.name for parameter in parameters}
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if not passes_on or "position_embeddings" not in names:
        return f"{type(layers[-1]).__name__} does not take rotary position embeddings"
    return None
