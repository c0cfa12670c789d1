"""A policy made trainable: weights in fp32, or a LoRA adapter on frozen ones; and saving it.

The master weights are fp32 whatever the parent was saved in: bf16 would round an update of 1e-6
away. Adapters chain: LoRA on a LoRA checkpoint goes on with that adapter, on anything else it
starts a new one. The optimiser's state lies beside the weights and is carried from window to
window while it belongs to the same parameters, by name.
"""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    get_peft_model,
    load_peft_weights,
    set_peft_model_state_dict,
)
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from babylon.core.errors import ModelError
from babylon.core.failpoints import failpoint
from babylon.policies.durable import save_tensors, sync, written
from babylon.policies.layers import TransferLayers, adapter_targets, tune_only
from babylon.policies.load import is_adapter, load_policy

logger = logging.getLogger(__name__)
Tuning = Literal["full", "lora"]
LORA_RANK, LORA_ALPHA = 16, 32
ADAM_BETAS = (0.9, 0.95)
_OPTIMIZER_FILE = "optimizer.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainable:
    """A model whose ``requires_grad`` parameters are what is tuned, with their optimiser."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    tuning: Tuning

    @property
    def tuned(self) -> dict[str, torch.nn.Parameter]:
        """What is tuned, by name, in the optimiser's order."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def reference(self) -> AbstractContextManager[object]:
        """The frozen anchor of a KL penalty: the model without its adapter.

        Raises:
            ModelError: full fine-tuning keeps no copy of the weights it started from.
        """
        if self.tuning == "full":
            raise ModelError("KL_PENALTY needs a frozen reference: set TUNING=lora, or unset it")
        return self._without_adapter()

    @contextmanager
    def _without_adapter(self) -> Iterator[None]:
        """peft lets every adapter weight be tuned afterwards, also those that are frozen."""
        tuned = self.tuned
        with self.model.disable_adapter():
            yield
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in tuned)


def load_trainable(
    parent: Path | str,
    tuning: Tuning,
    learning_rate: float,
    transfer_layers: TransferLayers = "all",
) -> Trainable:
    """The parent policy, ready for more training.

    Raises:
        ModelError: nothing loads from ``parent``, or it has no layers of the kind to tune.
    """
    if tuning == "lora":
        model, tokenizer = _with_adapter(parent, transfer_layers)
    else:
        model, tokenizer = load_policy(parent)
        model.requires_grad_(True)  # merging an adapter froze what it was merged into
    tune_only(model, transfer_layers)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=learning_rate, betas=ADAM_BETAS, weight_decay=0.0, fused=True
    )
    trainable = Trainable(model=model, tokenizer=tokenizer, optimizer=optimizer, tuning=tuning)
    _carry_over(trainable, Path(parent))
    return trainable


def save_checkpoint(trainable: Trainable, target: Path) -> Path:
    """Write weights, tokenizer and optimiser; the directory appears complete or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    failpoint("checkpoint.before")
    with written(temporary):
        trainable.model.save_pretrained(temporary)
        trainable.tokenizer.save_pretrained(temporary)
        state = {"names": list(trainable.tuned), "state": trainable.optimizer.state_dict()}
        save_tensors(state, temporary / _OPTIMIZER_FILE)
        for path in (*temporary.iterdir(), temporary):
            sync(path)
    failpoint("checkpoint.written")
    if target.exists():  # left by a run that crashed before it could commit
        shutil.rmtree(target)
    os.rename(temporary, target)
    sync(target.parent)
    failpoint("checkpoint.after")
    return target


def _with_adapter(
    parent: Path | str, layers: TransferLayers
) -> tuple[Any, PreTrainedTokenizerBase]:
    """The parent's adapter, on more layers if need be, or a new one; new layers change nothing."""
    chained = is_adapter(parent)
    config: Any = PeftConfig.from_pretrained(str(parent)) if chained else None
    base: PreTrainedModel
    base, tokenizer = load_policy(config.base_model_name_or_path if chained else parent)
    targets = adapter_targets(base, layers)
    if chained:
        if isinstance(config.target_modules, str):
            raise ModelError(
                f"{parent}: the adapter names its layers by a pattern, {config.target_modules!r}:"
                " set TUNING=full, which merges it"
            )
        config.target_modules = sorted({*config.target_modules, *targets})
        config.inference_mode = False
    else:
        config = LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=sorted(targets))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = get_peft_model(base, config)
    if chained:
        set_peft_model_state_dict(model, load_peft_weights(str(parent)))
    return model, tokenizer


def _carry_over(trainable: Trainable, parent: Path) -> None:
    """Take the parent's moments when they belong to the same parameters."""
    path = parent / _OPTIMIZER_FILE
    if not path.exists():
        return
    saved = torch.load(path, map_location="cpu", weights_only=True)
    tuned = trainable.tuned
    if saved.get("names") != list(tuned) or not _fits(saved["state"]["state"], tuned):
        logger.info("%s is of other parameters: the optimiser starts anew", path)
        return
    rates = [group["lr"] for group in trainable.optimizer.param_groups]
    trainable.optimizer.load_state_dict(saved["state"])
    for group, rate in zip(trainable.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _fits(state: dict[int, Any], tuned: dict[str, torch.nn.Parameter]) -> bool:
    return len(state) == len(tuned) and all(
        state[index]["exp_avg"].shape == parameter.shape
        for index, parameter in enumerate(tuned.values())
    )
