"""A policy made trainable: all weights in fp32, or a LoRA adapter on frozen ones; and saving it.

Adapters chain: LoRA on a LoRA checkpoint goes on with that adapter, on anything else it starts a
new one. The optimiser's state lies beside the weights and is carried from window to window while
the kind of tuning stays the same.
"""

import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import PreTrainedTokenizerBase

from babylon.checkpoints.load import is_adapter, load_policy
from babylon.errors import ModelError

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

    def reference(self) -> AbstractContextManager[object]:
        """The frozen anchor of a KL penalty: the model without its adapter.

        Raises:
            ModelError: full fine-tuning keeps no copy of the weights it started from.
        """
        if self.tuning == "full":
            raise ModelError("KL_PENALTY needs a frozen reference: set TUNING=lora, or unset it")
        context: AbstractContextManager[object] = self.model.disable_adapter()
        return context


def load_trainable(parent: Path | str, tuning: Tuning, learning_rate: float) -> Trainable:
    """The parent policy, ready for more training.

    Raises:
        ModelError: nothing loads from ``parent``.
    """
    if tuning == "lora" and is_adapter(parent):
        base = PeftConfig.from_pretrained(str(parent)).base_model_name_or_path
        model, tokenizer = load_policy(base)
        model = PeftModel.from_pretrained(model, str(parent), is_trainable=True)
    else:
        model, tokenizer = load_policy(parent)
        if tuning == "lora":
            lora = LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear")
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model = get_peft_model(model, lora)
        else:
            model.requires_grad_(True)  # merging an adapter froze what it was merged into
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=ADAM_BETAS, weight_decay=0.0)
    _carry_over(optimizer, Path(parent), learning_rate)
    return Trainable(model=model, tokenizer=tokenizer, optimizer=optimizer, tuning=tuning)


def save_checkpoint(trainable: Trainable, target: Path) -> Path:
    """Write weights, tokenizer and optimiser; the directory appears complete or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    trainable.model.save_pretrained(temporary)
    trainable.tokenizer.save_pretrained(temporary)
    torch.save(trainable.optimizer.state_dict(), temporary / _OPTIMIZER_FILE)
    for path in (*temporary.iterdir(), temporary):
        _sync(path)
    if target.exists():  # left by a run that crashed before it could commit
        shutil.rmtree(target)
    os.rename(temporary, target)
    _sync(target.parent)
    return target


def _sync(path: Path) -> None:
    """To the disk: a committed policy survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _carry_over(optimizer: torch.optim.Optimizer, parent: Path, learning_rate: float) -> None:
    """Take the parent's moments when they belong to parameters of the same shapes."""
    path = parent / _OPTIMIZER_FILE
    if not path.exists():
        return
    state = torch.load(path, map_location="cpu", weights_only=True)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = [state["state"].get(index, {}).get("exp_avg") for index in range(len(parameters))]
    if len(state["state"]) == len(parameters) and all(
        moment is not None and moment.shape == parameter.shape
        for moment, parameter in zip(moments, parameters, strict=True)
    ):
        optimizer.load_state_dict(state)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
