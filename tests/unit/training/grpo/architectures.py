"""Tiny random models of the architectures that people train."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.unit.training.grpo.trees import VOCABULARY

SLIDES = ["sliding_attention", "full_attention"]
MIXTURE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 24, "head_dim": 8},
    "gemma2": {
        "sliding_window": 24,
        "layer_types": SLIDES,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 16,
        "head_dim": 8,
    },
    "gemma3_text": {"sliding_window": 24, "layer_types": SLIDES, "head_dim": 8},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.2, "embedding_multiplier": 3.0},
    "qwen3_moe": {"num_experts": 4, "head_dim": 8, **MIXTURE},
    "gpt_oss": {
        "sliding_window": 24,
        "layer_types": SLIDES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        **MIXTURE,
    },
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 4,
        "head_dim": 8,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 24,
        **MIXTURE,
    },
}


def architecture(kind: str, **options: Any) -> Any:
    """Two layers of width 32. Every parameter is random, also those that are born zero or one."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = AutoConfig.for_model(kind, **(sizes | ARCHITECTURES.get(kind, {}) | options))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.15)
            if "norm" in name and not kind.startswith("gemma"):  # gemma adds one itself
                parameter.add_(1.0)
    return model.eval()
