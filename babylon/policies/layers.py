"""Which layers are tuned: all, attention alone, or feed-forward alone.

``attention`` and ``ffn`` are the blocks' modules of that name with everything inside them, such as
the norms of queries and keys. Embeddings, head and the norms between the blocks' modules belong to
neither: they are tuned by full fine-tuning of all layers only. An adapter on all layers is on
every linear layer but the head.
"""

from typing import Any, Literal

from torch import nn
from transformers.pytorch_utils import Conv1D

from babylon.core.errors import ModelError

TransferLayers = Literal["all", "attention", "ffn"]
_MODULES = {
    "attention": {"self_attn", "attn", "attention", "self_attention", "linear_attn"},
    "ffn": {"mlp", "ffn", "feed_forward", "block_sparse_moe", "moe"},
}


def is_selected(name: str, layers: TransferLayers) -> bool:
    """Whether a parameter or module of this dotted name is to be tuned."""
    return layers == "all" or not _MODULES[layers].isdisjoint(name.split("."))


def adapter_targets(model: Any, layers: TransferLayers) -> set[str]:
    """Names of the linear layers that an adapter goes on: the last two parts of each, which tell
    attention from feed-forward where both call a layer the same.

    Raises:
        ModelError: the model has no such layers.
    """
    head = model.get_output_embeddings()
    names = {
        ".".join(name.split(".")[-2:])
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
        and module is not head
        and is_selected(name, layers)
    }
    return names or _refuse(model, layers)


def tune_only(model: Any, layers: TransferLayers) -> None:
    """Freeze what of the trainable parameters is not selected.

    Raises:
        ModelError: nothing would be left to tune.
    """
    for name, parameter in model.named_parameters():
        if not is_selected(name, layers):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        _refuse(model, layers)


def _refuse(model: Any, layers: TransferLayers) -> set[str]:
    raise ModelError(
        f"TRANSFER_LAYERS={layers}, but the model ({model.config.model_type}) has no modules that"
        " are called so: set it to all"
    )
