"""Tiny random models of the architectures that people train."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.unit.training.grpo.trees import VOCABULARY

SLIDES = ["sliding_attention", "full_attention"]
MIXTURE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LINEAR = ["linear_attention", "full_attention"]
DELTA: dict[str, Any] = {
    "layer_types": LINEAR,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    # the norm of a state near zero would turn fp32's rounding into 2e-5, also in the formula
    "rms_norm_eps": 0.01,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
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
}
# layers with a state that a branch continues
STATES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], **MAMBA},
    "falcon_h1": {"mamba_d_ssm": 64, "lm_head_multiplier": 0.5, **MAMBA},
    "granitemoehybrid": {
        "layer_types": LINEAR,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        "position_embedding_type": "rope",
        "logits_scaling": 4.0,
        **MAMBA,
    },
    "kimi_linear": {
        "layer_types": LINEAR,
        "mlp_layer_types": ["dense", "sparse"],
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "num_local_experts": 4,
        **LATENT,
        **MIXTURE,
    },
    "bailing_hybrid": {
        "layer_types": LINEAR,
        "mlp_layer_types": ["dense", "sparse"],
        "head_dim": 8,
        "num_local_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        **LATENT,
        **MIXTURE,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        "num_experts": 4,
        "num_dense_layers": 0,
        **MIXTURE,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe", "mamba"],
        "head_dim": 8,
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 24,
        **MIXTURE,
    },
    "olmo_hybrid": DELTA,
    "qwen3_5_text": {"head_dim": 8, **DELTA},
    "qwen3_5_moe_text": {
        "head_dim": 8,
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        **DELTA,
        **MIXTURE,
    },
    "qwen3_next": {
        "head_dim": 8,
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        **DELTA,
        **MIXTURE,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "n_mamba_heads": 4,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "chunk_size": 16,
        "num_key_value_heads": 4,
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
    config = AutoConfig.for_model(
        kind, **(sizes | (ARCHITECTURES | STATES).get(kind, {}) | options)
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.15)
            if "norm" in name and not kind.startswith("gemma"):  # gemma adds one itself
                parameter.add_(1.0)
    return model.eval()
