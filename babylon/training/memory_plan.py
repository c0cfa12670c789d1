"""An estimate of a trainer's memory, from a model's configuration alone.

Weights, gradients and moments are counted on a model without data. Activations are estimated: see
``grpo/portion_size.py``; with recomputation a layer keeps only its input. The trainer finds
the portion that really fits: it halves portions when memory runs out, and remembers the result.
"""

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from babylon.core.errors import ModelError
from babylon.core.learning_settings import Precision
from babylon.policies.load import quiet_ranks, refuse_other_inputs
from babylon.training.grpo.portion_size import (
    CUDA_PORTION_TOKENS,
    SMALLEST,
    depth,
    layer_bytes,
)
from babylon.training.trainable import (
    TransferLayers,
    Tuning,
    TuningOptions,
    expert_targets,
    new_adapter,
    tune_only,
)

_NF4 = 0.5 + 4 / 64  # bytes a weight: four bits, and an fp32 scale for each block of 64
_MOMENTS = {"adamw": 8.0, "adamw8bit": 2.0}  # bytes a tuned weight
VLLM_SHARE = 0.9  # of the device, without --gpu-memory-utilization
_LOGITS = 2**22 * 4 * 3  # bytes of one chunk of the head and its statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes that an update holds on the device."""

    weights: int  # frozen ones in their precision, tuned ones in fp32
    gradients: int
    moments: int
    expert_copies: int  # of a layer's experts, to which PEFT adds their adapter
    keys_and_values: int  # of a context's tokens outside the portion, and their gradients
    activations: int  # of one portion
    head: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(asdict(self).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """Bytes that the programs of a home hold on a device that they share.

    The trainer, the checks before a deployment and recorded play run one after the other, beside
    the engine. A match runs through the engine and holds nothing itself.
    """

    engine: int  # as long as it runs
    checks: int  # one model at a time, frozen weights as in the trainer
    match_without_engine: int  # two models in fp32
    beside_engine: int  # left for trainer or checks


def share_device(
    config: PreTrainedConfig,
    *,
    engine: str,
    vllm_args: str,
    tuning: Tuning,
    memory: int,
    precision: Precision = "fp32",
    turns: bool = False,
) -> DevicePlan:
    """Plan engine, checks and matches on a device of ``memory`` bytes.

    vLLM takes its share of the device at its start, whatever the model. With full tuning, parent
    and update are two models: two servers of vLLM unless they take ``turns`` on one, or two copies
    in the embedded engine.
    """
    with torch.device("meta"):
        meta: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    meta.requires_grad_(False)
    model, read = (round(sum(_frozen_bytes(meta, kind))) for kind in ("fp32", precision))
    servers = 2 if tuning == "full" else 1
    if engine == "vllm":
        servers = 1 if turns else servers
        given = re.search(r"--gpu-memory-utilization[ =]([\d.]+)", vllm_args)
        held = round(memory * servers * (float(given[1]) if given else VLLM_SHARE))
    else:
        held = model * servers if engine == "embedded" else 0
    return DevicePlan(
        engine=held,
        checks=read + _LOGITS,
        match_without_engine=2 * model,
        beside_engine=memory - held,
    )


def device_memory() -> int | None:
    """Bytes of this machine's GPU, None without one."""
    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None


def model_config(model: str) -> PreTrainedConfig:
    """The configuration of a model's directory or id.

    Raises:
        ModelError: there is none.
    """
    if model.startswith((".", "/")) and not Path(model).is_dir():
        raise ModelError(f"{model} is not a directory: name one with a model, or a model's id")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"no configuration loads from {model}: {reason}") from error
    return config


def plan_memory(
    config: PreTrainedConfig,
    *,
    tuning: Tuning,
    layers: TransferLayers,
    options: TuningOptions,
    context: int,
    portion: int = CUDA_PORTION_TOKENS,
    recompute: bool = False,
    ranks: int = 1,
) -> MemoryPlan:
    """The plan of an update on CUDA, where matrix products are bf16.

    Args:
        context: tokens of the longest call.
        portion: tokens whose activations are in memory at once.
        recompute: activations are recomputed in the backward pass, for a third more time.
        ranks: processes with a device each. They divide the weights if all of them are tuned.

    Raises:
        ModelError: the model cannot be trained.
    """
    with torch.device("meta"):  # names and shapes without data, so that 70B models can be counted
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        refuse_other_inputs(model)
        model.requires_grad_(tuning == "full")
        experts = 0
        if tuning == "lora":
            names = expert_targets(model, layers)
            experts = sum(
                parameter.numel()
                for name, parameter in model.named_parameters()
                if ".".join(name.split(".")[-3:]) in names
            )
            adapter = new_adapter(model, layers, options)
            with quiet_ranks():
                model = get_peft_model(model, adapter, low_cpu_mem_usage=True)
        else:
            tune_only(model, layers)
    tuned = sum(p.numel() for p in model.parameters() if p.requires_grad)
    precision = options.base_precision if tuning == "lora" else "fp32"
    shards = ranks if tuning == "full" and options.optimizer == "adamw" else 1
    weights = sum(_frozen_bytes(model, precision)) + 4 * tuned
    plan = MemoryPlan(
        weights=round(weights / shards + (_gathered(model) if shards > 1 else 0)),
        gradients=4 * tuned // shards,
        moments=round(_MOMENTS[options.optimizer] * tuned / shards),
        expert_copies=(4 if precision == "fp32" else 2) * experts // depth(config),
        keys_and_values=0,
        activations=0,
        head=_LOGITS,
    )
    return in_portions(
        plan, config, precision=precision, context=context, portion=portion, recompute=recompute
    )


def in_portions(
    plan: MemoryPlan,
    config: PreTrainedConfig,
    *,
    precision: Precision,
    context: int,
    portion: int,
    recompute: bool,
) -> MemoryPlan:
    """The same update in portions of another size. ``precision`` is that of the layers."""
    layers, config = depth(config), config.get_text_config()
    stream = torch.float32 if precision == "fp32" else torch.bfloat16
    hidden, layer = int(config.hidden_size), layer_bytes(config, stream)
    kept = layers * hidden * stream.itemsize + layer if recompute else layers * layer
    heads = int(getattr(config, "num_attention_heads", 0))  # none in a model of states alone
    head = getattr(config, "head_dim", None) or hidden // max(1, heads)
    groups = getattr(config, "num_key_value_heads", None) or heads
    beyond = max(0, context - portion)
    return replace(
        plan,
        keys_and_values=beyond * layers * 2 * groups * head * (2 + 4),
        # Without recomputation, each layer keeps its copy for the backward pass.
        activations=portion * kept + (0 if recompute else (layers - 1) * plan.expert_copies),
    )


def portions_that_fit(
    plan: MemoryPlan,
    config: PreTrainedConfig,
    *,
    precision: Precision,
    context: int,
    memory: int,
) -> dict[str, int | None]:
    """Largest portions in tokens, with activations "kept" and "recomputed". None: nothing fits.

    A tenth of ``memory`` (bytes) is left to the allocator and the kernels. Small models take more
    than 16,384 tokens on CUDA, which are not tried here.
    """
    found: dict[str, int | None] = {}
    for name, recompute in (("kept", False), ("recomputed", True)):
        portion = CUDA_PORTION_TOKENS
        while portion >= SMALLEST:
            tried = in_portions(
                plan,
                config,
                precision=precision,
                context=context,
                portion=portion,
                recompute=recompute,
            )
            if tried.total <= 0.9 * memory:
                break
            portion //= 2
        found[name] = portion if portion >= SMALLEST else None
    return found


def _gathered(model: nn.Module) -> float:
    """Bytes that a rank of several has whole in a pass: all outside the layers, and two layers.

    The weights of the next layer arrive while one computes. Gradients come at the same size.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    sizes = sorted(sum(p.numel() for p in layer.parameters()) for layer in layers)
    outside = sum(p.numel() for p in model.parameters()) - sum(sizes)
    return 2 * 4.0 * (outside + sum(sizes[-2:]))


def _frozen_bytes(model: nn.Module, precision: str) -> list[float]:
    base: Any = model
    output = base.get_output_embeddings().weight
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    each = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            continue
        size = 4.0 if precision == "fp32" or parameter is output else 2.0
        if precision == "nf4" and id(parameter) in linear and parameter is not output:
            size = _NF4
        each.append(size * parameter.numel())
    return each
