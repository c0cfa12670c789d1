"""Selection of the tuned layers: all, attention only, or feed-forward only.

``attention`` and ``ffn`` are the blocks' modules of these names with everything inside, such as the
norms of queries and keys. Embeddings, head and the norms between the blocks' modules belong to
neither; only full fine-tuning of all layers tunes them. An adapter on all layers is on every linear
layer except the head.
"""

from typing import Literal, NoReturn

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from babylon.core.errors import ModelError

TransferLayers = Literal["all", "attention", "ffn"]
_MODULES = {
    "attention": {"self_attn", "attn", "attention", "self_attention", "linear_attn"},
    "ffn": {"mlp", "ffn", "feed_forward", "block_sparse_moe", "moe"},
}


def is_selected(name: str, layers: TransferLayers) -> bool:
    """True if a parameter or module of this dotted name is tuned."""
    return layers == "all" or not _MODULES[layers].isdisjoint(name.split("."))


def adapter_targets(model: PreTrainedModel, layers: TransferLayers) -> set[str]:
    """The last two parts of the names of the linear layers that get an adapter.

    The last part alone can be the same in attention and feed-forward.

    Raises:
        ModelError: the model has no such layers.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    names = {
        ".".join(name.split(".")[-2:])
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
        and module is not head
        and is_selected(name, layers)
    }
    if not names:
        _refuse(model, layers)
    return names


def tune_only(model: nn.Module, layers: TransferLayers) -> None:
    """Freeze the parameters outside ``layers``.

    Raises:
        ModelError: no parameter would be left to tune.
    """
    for name, parameter in model.named_parameters():
        if not is_selected(name, layers):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        _refuse(model, layers)


def _refuse(model: nn.Module, layers: TransferLayers) -> NoReturn:
    kind = getattr(model, "config", None)
    raise ModelError(
        f"TRANSFER_LAYERS={layers}, but the model ({getattr(kind, 'model_type', kind)}) has no"
        " modules with these names: set it to all"
    )
