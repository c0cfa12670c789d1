"""Which models can attend through a prefix tree: causal LMs of transformers, attention as usual."""

import inspect
from typing import Any

from transformers import PreTrainedModel

_LENGTH_DEPENDENT = {"dynamic", "longrope"}


def causal_lm(model: Any) -> Any:
    """The model of transformers that a peft model was made of, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def why_not_standard(model: Any) -> str | None:
    """Why a prefix tree would give this model other values than its calls one by one, or None."""
    kinds = {str(c.peft_type.value) for c in getattr(model, "peft_config", {}).values()}
    if kinds - {"LORA"}:
        return f"its {', '.join(sorted(kinds))} adapter is not LoRA"
    if not isinstance(model := causal_lm(model), PreTrainedModel):
        return f"{type(model).__name__} is not a model of transformers"
    config: Any = model.config
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if not model._supports_attention_backend:
        return f"{type(model).__name__} does not call attention through transformers' registry"
    if model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        return f"{type(model).__name__} has no language-model head"
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    if kinds:
        return f"it has layers of type {', '.join(sorted(kinds))}"
    if not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None):
        return f"its attention slides over {config.sliding_window} tokens"
    return _why_not_layers(model.base_model, config)


def _why_not_layers(backbone: Any, config: Any) -> str | None:
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotation in _LENGTH_DEPENDENT:
        return f"its {rotation} rotary embedding depends on the longest call of a batch"
    layers = getattr(backbone, "layers", None)
    if not layers:
        return f"{type(backbone).__name__} keeps its layers elsewhere than in .layers"
    parameters = inspect.signature(layers[-1].forward).parameters.values()
    names = {parameter.name for parameter in parameters}
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if not passes_on or "position_embeddings" not in names:
        return f"{type(layers[-1]).__name__} does not take rotary position embeddings"
    return None
