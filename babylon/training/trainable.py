"""Load a policy for training, and save it: fp32 weights, or a LoRA adapter on frozen weights.

Master weights are fp32 even if the parent was saved in bf16, because bf16 rounds an update of 1e-6
to zero. LoRA training of a LoRA checkpoint continues its adapter; LoRA training of a full model
starts a new adapter. The optimiser's state is saved beside the weights, and is carried from window
to window as long as the names of the tuned parameters stay the same.

The tuned layers are all, attention only, or feed-forward only. ``attention`` and ``ffn`` are the
blocks' modules of these names with everything inside, such as the norms of queries and keys.
Embeddings, head and the norms between the blocks' modules belong to neither; only full fine-tuning
of all layers tunes them. An adapter on all layers is on every linear layer except the head, and on
the experts of a mixture, which are parameters and not layers. Routers keep their weights.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal, NoReturn

import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from babylon.core.errors import ModelError
from babylon.core.failpoints import failpoint
from babylon.core.home import sync
from babylon.core.learning_settings import Precision
from babylon.policies.checkpoint_files import adapter_base, make_portable
from babylon.policies.durable import save_tensors, written
from babylon.policies.load import is_adapter, load_policy, quiet_ranks
from babylon.training.damaged import damage_logged
from babylon.training.grpo.shards import collected, with_states
from babylon.training.resize_adapter import resized

TransferLayers = Literal["all", "attention", "ffn"]
_MODULES = {
    "attention": {"self_attn", "attn", "attention", "self_attention", "linear_attn"},
    "ffn": {"mlp", "ffn", "feed_forward", "block_sparse_moe", "moe"},
}
# PEFT refuses out_proj in models of these types, whose kernels read its weight themselves
_MAMBA = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}


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
    left_out = {"out_proj"} if model.config.model_type in _MAMBA else set()
    names = {
        ".".join(name.split(".")[-2:])
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
        and module is not head
        and name.split(".")[-1] not in left_out
        and is_selected(name, layers)
    }
    if not names:
        _refuse(model, layers)
    return names


def expert_targets(model: PreTrainedModel, layers: TransferLayers) -> set[str]:
    """The names of a mixture's fused expert weights ``[experts, rows, columns]``.

    They are parameters of a module of experts, which no linear layer shows.
    """
    return {
        ".".join(f"{name}.{parameter}".split(".")[-3:])
        for name, module in model.named_modules()
        if name.endswith("experts") and is_selected(name, layers)
        for parameter, value in module.named_parameters(recurse=False)
        if value.ndim == 3
    }


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


Tuning = Literal["full", "lora"]
ADAM_BETAS = (0.9, 0.95)
_OPTIMIZER_FILE = "optimizer.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningOptions:
    """The form of new adapters, and the memory of weights and optimiser.

    ``base_precision`` is that of the frozen weights below an adapter. The head stays fp32, because
    rounding a logit to bf16 changes it more than a small update does.
    """

    rank: int = 16
    alpha: float = 32
    adapter: Literal["lora", "rslora", "dora"] = "lora"
    base_precision: Precision = "fp32"
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    resize: bool = False  # a continued adapter gets ``rank`` too


DEFAULT_OPTIONS = TuningOptions()


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


@dataclass(slots=True)
class SharedBase:
    """A frozen model below several adapters, which are trained one after the other."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    adapted: PeftModel | None = None

    @classmethod
    def below(cls, parent: Path | str, options: TuningOptions = DEFAULT_OPTIONS) -> "SharedBase":
        """Load the model that ``parent``'s adapter is on, or ``parent`` if it is none.

        Raises:
            ModelError: nothing loads from ``parent``.
        """
        path = adapter_base(str(parent)) if is_adapter(parent) else parent
        return cls(*load_policy(str(path), precision=options.base_precision))

    def restore(self) -> None:
        """Remove the adapter of the last update. The frozen weights were never changed."""
        if self.adapted is not None:
            self.model = self.adapted.unload()
            vars(self.model).pop("peft_config", None)
            self.adapted = None


def load_trainable(
    parent: Path | str,
    tuning: Tuning,
    learning_rate: float,
    transfer_layers: TransferLayers = "all",
    options: TuningOptions = DEFAULT_OPTIONS,
    optimizer_of: Path | str | None = None,
    base: SharedBase | None = None,
    device: str | None = None,
) -> Trainable:
    """Load the parent policy for training, with the optimiser of ``optimizer_of`` or its own.

    All weights are tuned on ``device``, by default the GPU if there is one.

    Raises:
        ModelError: nothing loads from ``parent``, its weights are not finite, or it has no layers
            of the selected kind.
    """
    model: PreTrainedModel | PeftModel
    if tuning == "lora":
        model, tokenizer = _with_adapter(parent, transfer_layers, options, base)
    else:
        model, tokenizer = load_policy(parent, device=device)
        model.requires_grad_(True)  # merging an adapter froze the weights below it
    tune_only(model, transfer_layers)
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ModelError(f"{name} of {parent} is not finite: train from another checkpoint")
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = new_optimizer(parameters, learning_rate, options)
    trainable = Trainable(model=model, tokenizer=tokenizer, optimizer=optimizer, tuning=tuning)
    _carry_over(trainable, Path(optimizer_of or parent))
    return trainable


@dataclass(frozen=True, slots=True)
class WholeState:
    """Whole weights by name, None if the model itself has them whole, and the optimiser's state."""

    weights: dict[str, torch.Tensor] | None
    optimizer: dict[str, Any]


def whole_state(trainable: Trainable, *, first: bool = True) -> WholeState:
    """Weights and optimiser. All ranks call this together, and the ``first`` gets what is divided.

    Tensors are gathered one at a time, so a device needs room for the largest one.
    """
    model, state = trainable.model, trainable.optimizer.state_dict()
    weights = dict(model.named_parameters())
    if not any(isinstance(weight, DTensor) for weight in weights.values()):
        return WholeState(None, state)
    tied = dict(model.named_parameters(remove_duplicate=False))
    buffers = {n: v for n, v in model.state_dict().items() if n not in tied}
    gather = partial(collected, first=first)
    found = {name: gather(v.detach(), v) for name, v in (weights | buffers).items()}
    return WholeState(found, with_states(state, list(trainable.tuned.values()), gather))


def save_checkpoint(
    trainable: Trainable,
    target: Path,
    more: Mapping[str, object] | None = None,
    state: WholeState | None = None,
) -> Path:
    """Write weights, tokenizer and optimiser, and ``more`` tensors by the names of their files.

    ``state`` is of a trainable that is divided among ranks. ``target`` appears complete
    or not at all.
    """
    state = state or whole_state(trainable)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    failpoint("checkpoint.before")
    with written(temporary):
        trainable.model.save_pretrained(temporary, state_dict=state.weights)
        make_portable(temporary, target)
        trainable.tokenizer.save_pretrained(temporary)
        named = {"names": list(trainable.tuned), "state": state.optimizer}
        for name, saved in {_OPTIMIZER_FILE: named, **(more or {})}.items():
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
    parent: Path | str,
    layers: TransferLayers,
    options: TuningOptions,
    shared: SharedBase | None,
) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """The parent's adapter, extended to ``layers``, or a new one. New layers start at zero.

    A continued adapter keeps its scale and variant, and its rank unless ``options.resize``.
    """
    # Long, because what a continued adapter keeps and what it gets anew is decided item by item.
    below = shared or SharedBase.below(parent, options)
    base, tokenizer = below.model, below.tokenizer
    if not is_adapter(parent):
        below.adapted = _adapted(base, new_adapter(base, layers, options))
        return below.adapted, tokenizer
    config = LoraConfig.from_pretrained(str(parent))
    config.base_model_name_or_path = adapter_base(str(parent))
    if isinstance(config.target_modules, str):
        raise ModelError(
            f"{parent}: the adapter names its layers by a pattern, {config.target_modules!r}:"
            " set TUNING=full, which merges it"
        )
    config.target_modules = sorted({*config.target_modules, *adapter_targets(base, layers)})
    # adapters that were made without experts keep the ranks of their other layers
    experts = {*(config.target_parameters or ()), *expert_targets(base, layers)}
    config.target_parameters = sorted(experts) or None
    config.inference_mode = False
    weights = load_peft_weights(str(parent))
    resize = options.resize and config.r != options.rank
    if resize:
        if experts or config.use_dora:
            raise ModelError(
                f"the adapter of {parent} has {'experts' if experts else 'magnitudes'}, and only"
                " plain LoRA can change its rank: leave rank out of POPULATION_GENES"
            )
        root = (config.r / options.rank) ** 0.5 if config.use_rslora else config.r / options.rank
        config.lora_alpha, config.r = config.lora_alpha / root, options.rank
    model = below.adapted = _adapted(base, config)
    if resize:
        weights = resized(weights, get_peft_model_state_dict(model))
    set_peft_model_state_dict(model, weights)
    return model, tokenizer


def new_adapter(
    base: PreTrainedModel, layers: TransferLayers, options: TuningOptions
) -> LoraConfig:
    """The configuration of a new adapter.

    An expert's rank is the rank over the number of experts that a token sees, with the same scale
    (Schulman et al. 2025, "LoRA Without Regret").

    Raises:
        ModelError: DoRA, which PEFT cannot put on experts, or experts of an unknown form.
    """
    experts = sorted(expert_targets(base, layers))
    _refuse_unknown_experts(base, layers)
    if experts and options.adapter == "dora":
        raise ModelError(f"LORA_VARIANT=dora has no form for experts ({experts[0]}): take lora")
    active = int(getattr(base.config, "num_experts_per_tok", None) or 1)
    rank = max(1, options.rank // active)
    scale = options.alpha / (options.rank**0.5 if options.adapter == "rslora" else options.rank)
    root = rank**0.5 if options.adapter == "rslora" else rank
    names = [name.replace(".", r"\.") for name in experts]
    return LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=sorted(adapter_targets(base, layers)),
        target_parameters=experts or None,
        rank_pattern=dict.fromkeys(names, rank),
        alpha_pattern=dict.fromkeys(names, scale * root),
        use_rslora=options.adapter == "rslora",
        use_dora=options.adapter == "dora",
    )


def _refuse_unknown_experts(base: PreTrainedModel, layers: TransferLayers) -> None:
    for name, module in base.named_modules():
        stacked = [one for one in module.parameters(recurse=False) if one.ndim == 3]
        known = name.endswith("experts") or isinstance(module, nn.Conv1d)
        if stacked and not known and is_selected(name, layers):
            raise ModelError(
                f"an adapter would leave out {name}, which looks like experts"
                f" ({base.config.model_type} keeps them in a form of its own): set TUNING=full, or"
                " TRANSFER_LAYERS"
            )


def new_optimizer(
    parameters: list[torch.nn.Parameter], learning_rate: float, options: TuningOptions
) -> torch.optim.Optimizer:
    """The optimiser that ``options`` name.

    Raises:
        ModelError: its library is not installed.
    """
    if options.optimizer == "adamw":
        return torch.optim.AdamW(
            parameters, lr=learning_rate, betas=ADAM_BETAS, weight_decay=0.0, fused=True
        )
    try:
        bitsandbytes = import_module("bitsandbytes")
    except ImportError as error:
        raise ModelError("OPTIMIZER=adamw8bit needs bitsandbytes: pip install it") from error
    made: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(
        parameters, lr=learning_rate, betas=ADAM_BETAS, weight_decay=0.0
    )
    return made


def _adapted(base: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """A new adapter on ``base``, with the same initial weights on every call."""
    with torch.random.fork_rng(), quiet_ranks():
        torch.manual_seed(0)
        return get_peft_model(base, config)


def _carry_over(trainable: Trainable, checkpoint: Path) -> None:
    path = checkpoint / _OPTIMIZER_FILE
    if not path.exists():
        return
    state: dict[str, Any] = {}
    # The weights are whole: without momentum the next steps are as small as the first ones.
    with damage_logged(path, "the optimiser starts over"):
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if saved["names"] != list(trainable.tuned) or not _fits(saved["state"]["state"], trainable):
            raise ModelError("it belongs to other parameters")
        state = saved["state"]
    if not state:
        return
    rates = [group["lr"] for group in trainable.optimizer.param_groups]
    trainable.optimizer.load_state_dict(state)
    for group, rate in zip(trainable.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _fits(state: dict[int, dict[str, Any]], trainable: Trainable) -> bool:
    tuned = list(trainable.tuned.values())
    moment = "exp_avg" if isinstance(trainable.optimizer, torch.optim.AdamW) else "state1"
    saved = [_tensors(state[index]) for index in range(len(tuned))]
    return len(state) == len(tuned) and all(
        moment in of_one
        and of_one[moment].shape == parameter.shape
        and all(bool(torch.isfinite(value).all()) for value in of_one.values())
        for of_one, parameter in zip(saved, tuned, strict=True)
    )


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a parameter's state. bitsandbytes keeps some in a dictionary of its own."""
    inner = [value for value in state.values() if isinstance(value, dict)]
    every = {name: value for part in (state, *inner) for name, value in part.items()}
    return {name: value for name, value in every.items() if isinstance(value, torch.Tensor)}
