"""Runs in vLLM's Python: the change of each expert's weights that vLLM reads from an adapter.

``python read_experts.py ADAPTER EXPERTS TARGET`` writes gate, down and up of the first layer.
"""

import sys
from types import SimpleNamespace

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper

LAYER = "model.layers.0.mlp.experts"
adapter, count, target = sys.argv[1], int(sys.argv[2]), sys.argv[3]
read = LoRAModel.from_local_checkpoint(
    adapter,
    {"experts", "q_proj", "k_proj", "v_proj", "o_proj"},
    PEFTHelper.from_local_dir(adapter, 512),
    lora_model_id=1,
    device="cpu",
    dtype=torch.float32,
)
for weights in read.loras.values():
    weights.optimize()  # multiplies by the scale, as a server does
config = SimpleNamespace(architectures=["Qwen3MoeForCausalLM"])
manager = SimpleNamespace(
    model=SimpleNamespace(config=config),
    _get_lora_layer_weights=lambda model, name: model.loras.get(name),
)
experts = SimpleNamespace(local_num_experts=count, global_num_experts=count, ep_rank=0)
LoRAModelManager._convert_3d_to_2d_moe_lora(manager, read, experts, LAYER)
found = read.loras[LAYER]
torch.save([b @ a for a, b in zip(found.lora_a, found.lora_b, strict=True)], target)
