"""The model and optimiser of all contenders except AgileRL."""

from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor

from benchmarks.trainer.contenders import Task
from benchmarks.trainer.models import (
    build_model,
    lora_config,
    make_optimizer,
    seed_adapter,
    trained_parameters,
)


def policy(task: Task) -> torch.nn.Module:
    """The task's policy in ``eval`` mode, with its adapter if it is tuned by LoRA."""
    model: torch.nn.Module = build_model(task.config, task.seed)
    if task.tuning == "lora":
        model = get_peft_model(model, lora_config())
        seed_adapter(model, task.seed)
    return model.eval()


class LocalSession:
    """Clipping, AdamW step and zeroing, the same for all."""

    def __init__(self, model: torch.nn.Module, task: Task) -> None:
        self.model = model
        self.optimizer: torch.optim.Optimizer = make_optimizer(model)
        self.grad_clip = task.grad_clip

    def backbone(self, ids: Tensor) -> Tensor:
        """Hidden states ``[B, L, d]`` after the last norm."""
        causal_lm: Any = self.model
        causal_lm = causal_lm.get_base_model() if hasattr(causal_lm, "peft_config") else causal_lm
        hidden: Tensor = causal_lm.model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        model: Any = self.model
        logits: Tensor = model.get_output_embeddings()(hidden)
        return logits

    def update(self) -> None:
        parameters = [parameter for _, parameter in trained_parameters(self.model)]
        torch.nn.utils.clip_grad_norm_(parameters, self.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
