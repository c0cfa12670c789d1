"""Size of a portion: enough tokens to keep the device busy, few enough for its memory.

A layer keeps about twelve values a token of the model's width for its backward pass, and four of
the feed-forward width. Both were fitted to the peaks of two models on an H100.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedConfig

CUDA_PORTION_TOKENS = 16_384
CUDA_MOST_TOKENS = 65_536
# a CPU is fastest when the activations of a layer fit into its cache, so wide models get smaller
# portions; measured in docs/benchmarks/trainer.md
CPU_PORTION_TOKENS = (512, 3072)
CPU_PORTION_VALUES = 2**19
SMALLEST = 64  # tokens a portion: with fewer, activations are negligible beside the weights
_ROOM = 0.6  # of free memory: the rest is for activations of shared text, the head, and kernels
_MOMENTS_AND_GRADIENT = 12  # bytes a tuned weight


def portion_tokens(device: str, hidden_size: int, room: float = 0.0) -> int:
    """Return the default number of input tokens of a portion, for a model of this width.

    Args:
        room: tokens whose activations fit into a GPU's memory. A small model is slow there in small
            portions, because starting a kernel takes longer than running it.
    """
    if device != "cpu":
        return int(min(max(CUDA_PORTION_TOKENS, _ROOM * room), CUDA_MOST_TOKENS))
    smallest, largest = CPU_PORTION_TOKENS
    return min(max(CPU_PORTION_VALUES // hidden_size, smallest), largest)


def tokens_in_memory(model: nn.Module, config: PreTrainedConfig) -> float:
    """Return how many tokens' activations fit into the free memory of the model's GPU."""
    parameters = list(model.parameters())
    if not parameters[0].is_cuda:
        return 0.0
    tuned = sum(p.numel() for p in parameters if p.requires_grad)
    device = parameters[0].device
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + cached - _MOMENTS_AND_GRADIENT * tuned
    return max(0, free) / (depth(config) * layer_bytes(config, parameters[0].dtype))


def layer_bytes(config: PreTrainedConfig, stream: torch.dtype) -> int:
    """Bytes that a layer keeps of a token for its backward pass, where products are bf16.

    ``stream``: dtype of the hidden states between the layers, which is that of the embeddings.
    """
    width = int(config.get_text_config().hidden_size)
    return 12 * width * stream.itemsize + 4 * active_width(config) * 2


def depth(config: PreTrainedConfig) -> int:
    """Layers of the text model."""
    return int(config.get_text_config().num_hidden_layers)


def active_width(config: PreTrainedConfig) -> int:
    """Feed-forward values that a token computes: those of its experts, in a mixture.

    Mixtral and gpt-oss call the width of one expert what a dense model calls its whole width.
    """
    config = config.get_text_config()
    names = ("moe_intermediate_size", "intermediate_size", "ffn_hidden_size", "n_inner")
    known = (getattr(config, name, None) for name in names)
    each = next(filter(None, known), 4 * int(config.hidden_size))  # GPT-2 and Bloom name none
    if isinstance(each, Sequence):  # Gemma 3n has a width for each layer
        each = max(each)
    routed = getattr(config, "num_experts_per_tok", None) or 1
    shared = getattr(config, "n_shared_experts", None) or 0
    others = ("shared_expert_intermediate_size", "shared_intermediate_size")
    beside = sum(int(getattr(config, name, None) or 0) for name in others)
    return int(each) * (int(routed) + int(shared)) + beside
