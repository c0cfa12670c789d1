"""The policies: random weights from a seed, the same in every process, and their trained part."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal
from zlib import crc32

import torch
from peft import LoraConfig
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Tuning = Literal["full", "lora"]
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA_RANK = 16
LEARNING_RATE = 1e-6
GRAD_CLIP = 1.0
_HEAD_SCALE = 0.1  # near-uniform replies: near enough to the window's mu that no mask takes effect


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that the FLOP formula needs."""

    layers: int
    hidden: int
    attention: int  # width of all query heads together
    vocab: int
    layer_weights: int  # in the matrices of one layer
    adapter_weights: int  # LoRA of one layer


def qwen3(hidden: int, layers: int, *, vocab: int = 4096) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(4, hidden // 64),
        num_key_value_heads=max(2, hidden // 128),
        head_dim=min(64, hidden // 4),
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


MODELS = {"small": qwen3(128, 4), "larger": qwen3(512, 8)}

GPU_MODELS = {  # config.json of Qwen/Qwen2.5-0.5B and -7B
    "qwen2.5-0.5b": Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    ),
    "qwen2.5-7b": Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
    ),
}


def shape_of(config: PreTrainedConfig) -> ModelShape:
    settings: Any = config
    hidden, inner = settings.hidden_size, settings.intermediate_size
    head = getattr(settings, "head_dim", None) or hidden // settings.num_attention_heads
    queries, keys = settings.num_attention_heads * head, settings.num_key_value_heads * head
    matrices = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    matrices += [(hidden, inner), (hidden, inner), (inner, hidden)]
    return ModelShape(
        layers=settings.num_hidden_layers,
        hidden=hidden,
        attention=queries,
        vocab=settings.vocab_size,
        layer_weights=sum(rows * columns for rows, columns in matrices),
        adapter_weights=sum(LORA_RANK * (rows + columns) for rows, columns in matrices),
    )


def build_model(
    config: PreTrainedConfig,
    seed: int,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Build a model with random trainable weights, no dropout, and PyTorch's own attention."""
    torch.manual_seed(seed)
    family: Any = Qwen2ForCausalLM if isinstance(config, Qwen2Config) else Qwen3ForCausalLM
    config._attn_implementation = "sdpa"
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = family(config)
    finally:
        torch.set_default_dtype(previous)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(_HEAD_SCALE)
    causal_lm: PreTrainedModel = model
    return causal_lm


def lora_config() -> LoraConfig:
    return LoraConfig(
        r=LORA_RANK,
        lora_alpha=2 * LORA_RANK,
        lora_dropout=0.0,
        target_modules=list(LORA_TARGETS),
        task_type="CAUSAL_LM",
    )


def canonical(name: str) -> str:
    """A parameter's name without the parts that wrappers and adapters add."""
    name = name.removeprefix("base_model.model.")
    for piece in (".default", ".actor", ".base_layer", "._orig_mod"):
        name = name.replace(piece, "")
    return name


def trained_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(canonical name, parameter) of every trained parameter."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield canonical(name), parameter


def seed_adapter(model: torch.nn.Module, seed: int) -> None:
    """Give all trainers the same adapter weights, with B not 0, so that A has a gradient."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                source = torch.Generator().manual_seed(seed + crc32(canonical(name).encode()))
                drawn = torch.randn(parameter.shape, generator=source) * 0.02
                parameter.copy_(drawn)


def make_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    parameters = [parameter for _, parameter in trained_parameters(model)]
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
