"""Load a policy for training, and save it: fp32 weights, or a LoRA adapter on frozen weights.

Master weights are fp32 even if the parent was saved in bf16, because bf16 rounds an update of 1e-6
to zero. LoRA training of a LoRA checkpoint continues its adapter; LoRA training of a full model
starts a new adapter. The optimiser's state is saved beside the weights, and is carried from window
to window as long as the names of the tuned parameters stay the same.

The tuned layers are all, attention only, or feed-forward only. ``attention`` and ``ffn`` are the
blocks' modules of these names with everything inside, such as the norms of queries and keys.
Embeddings, head and the norms between the blocks' modules belong to neither; only full fine-tuning
of all layers tunes them. An adapter on all layers is on every linear layer except the head.
"""

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal, NoReturn

import torch
from peft import LoraConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from babylon.core.errors import ModelError
from babylon.core.failpoints import failpoint
from babylon.policies.checkpoint_files import adapter_base, make_portable
from babylon.policies.durable import save_tensors, sync, written
from babylon.policies.load import is_adapter, load_policy

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


logger = logging.getLogger(__name__)
Tuning = Literal["full", "lora"]
LORA_RANK, LORA_ALPHA = 16, 32
ADAM_BETAS = (0.9, 0.95)
_OPTIMIZER_FILE = "optimizer.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainable:
    """A model with its tokenizer and optimiser. Parameters with ``requires_grad`` are tuned."""

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    tuning: Tuning

    @property
    def tuned(self) -> dict[str, torch.nn.Parameter]:
        """The tuned parameters by name, in the optimiser's order."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


def load_trainable(
    parent: Path | str,
    tuning: Tuning,
    learning_rate: float,
    transfer_layers: TransferLayers = "all",
    optimizer_of: Path | str | None = None,
) -> Trainable:
    """Load the parent policy for training, with the optimiser of ``optimizer_of`` or its own.

    Raises:
        ModelError: nothing loads from ``parent``, or it has no layers of the selected kind.
    """
    model: PreTrainedModel | PeftModel
    if tuning == "lora":
        model, tokenizer = _with_adapter(parent, transfer_layers)
    else:
        model, tokenizer = load_policy(parent)
        model.requires_grad_(True)  # merging an adapter froze the weights below it
    tune_only(model, transfer_layers)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=learning_rate, betas=ADAM_BETAS, weight_decay=0.0, fused=True
    )
    trainable = Trainable(model=model, tokenizer=tokenizer, optimizer=optimizer, tuning=tuning)
    _carry_over(trainable, Path(optimizer_of or parent))
    return trainable


def save_checkpoint(
    trainable: Trainable, target: Path, more: Mapping[str, object] | None = None
) -> Path:
    """Write weights, tokenizer and optimiser, and ``more`` tensors by the names of their files.

    ``target`` appears complete or not at all.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    failpoint("checkpoint.before")
    with written(temporary):
        trainable.model.save_pretrained(temporary)
        make_portable(temporary, target)
        trainable.tokenizer.save_pretrained(temporary)
        state = {"names": list(trainable.tuned), "state": trainable.optimizer.state_dict()}
        for name, saved in {_OPTIMIZER_FILE: state, **(more or {})}.items():
            save_tensors(saved, temporary / name)
        for path in (*temporary.iterdir(), temporary):
            sync(path)
    failpoint("checkpoint.written")
    if target.exists():  # left by a run that crashed before its commit
        shutil.rmtree(target)
    os.rename(temporary, target)
    sync(target.parent)
    failpoint("checkpoint.after")
    return target


def _with_adapter(
    parent: Path | str, layers: TransferLayers
) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """The parent's adapter, extended to ``layers``, or a new one. New layers start at zero."""
    if not is_adapter(parent):
        base, tokenizer = load_policy(parent)
        targets = sorted(adapter_targets(base, layers))
        config = LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=targets)
        return _adapted(base, config), tokenizer
    config = LoraConfig.from_pretrained(str(parent))
    config.base_model_name_or_path = adapter_base(str(parent))
    base, tokenizer = load_policy(str(config.base_model_name_or_path))
    if isinstance(config.target_modules, str):
        raise ModelError(
            f"{parent}: the adapter names its layers by a pattern, {config.target_modules!r}:"
            " set TUNING=full, which merges it"
        )
    config.target_modules = sorted({*config.target_modules, *adapter_targets(base, layers)})
    config.inference_mode = False
    model = _adapted(base, config)
    set_peft_model_state_dict(model, load_peft_weights(str(parent)))
    return model, tokenizer


def _adapted(base: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """A new adapter on ``base``, with the same initial weights on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return get_peft_model(base, config)


def _carry_over(trainable: Trainable, checkpoint: Path) -> None:
    path = checkpoint / _OPTIMIZER_FILE
    if not path.exists():
        return
    saved = torch.load(path, map_location="cpu", weights_only=True)
    tuned = trainable.tuned
    if saved.get("names") != list(tuned) or not _fits(saved["state"]["state"], tuned):
        logger.info("%s belongs to other parameters: the optimiser starts over", path)
        return
    rates = [group["lr"] for group in trainable.optimizer.param_groups]
    trainable.optimizer.load_state_dict(saved["state"])
    for group, rate in zip(trainable.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _fits(state: dict[int, dict[str, torch.Tensor]], tuned: dict[str, torch.nn.Parameter]) -> bool:
    return len(state) == len(tuned) and all(
        state[index]["exp_avg"].shape == parameter.shape
        for index, parameter in enumerate(tuned.values())
    )
