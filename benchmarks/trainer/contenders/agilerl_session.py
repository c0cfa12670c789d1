"""AgileRL's ``GRPO.learn((ids, masks, rewards), sampling_logps=...)`` on logged calls.

It trains LoRA adapters only. Its LLM extra pins an older transformers and requires bitsandbytes,
liger-kernel and openenv, which a CPU run does not use. The flag that checks for them is set, so
that it runs on the same torch, transformers and peft as the others. A window is passed in parts,
padded like the whole; the optimiser steps after the last. Rewards are the advantages, whose
mean is 0. Variant ``checkpointing`` is unmodified AgileRL: activations are computed twice.
"""

from collections.abc import Sequence
from typing import Any

import agilerl
import torch
from torch import Tensor

agilerl.HAS_LLM_DEPENDENCIES = True

from agilerl.algorithms.grpo import GRPO  # noqa: E402

from benchmarks.trainer.cases import PADDING, Call  # noqa: E402
from benchmarks.trainer.contenders import Session, Task  # noqa: E402
from benchmarks.trainer.contenders.padded import chunks, right_padded  # noqa: E402
from benchmarks.trainer.flops import rows_work  # noqa: E402
from benchmarks.trainer.models import (  # noqa: E402
    LEARNING_RATE,
    build_model,
    lora_config,
    seed_adapter,
)


class AgileSession:
    """Its optimiser's step is held back until ``update``; clipping and zeroing stay its own."""

    def __init__(self, task: Task, *, checkpointing: bool) -> None:
        calls = task.window.calls
        self.longest = task.window.longest
        self.portions = chunks(calls, len(calls) // task.parts)
        size = len(self.portions[0])
        self.agent = GRPO(
            pad_token_id=PADDING,
            pad_token="<pad>",
            actor_network=build_model(task.config, task.seed),
            batch_size=task.parts,
            group_size=size,
            mini_batch_size=len(calls),
            micro_batch_size_per_gpu=task.micro_batch,
            lora_config=lora_config(),
            beta=0.0,
            lr=LEARNING_RATE,
            max_grad_norm=task.grad_clip,
            temperature=1.0,
            max_model_len=self.longest,
            gradient_checkpointing=checkpointing,
            use_liger_loss=False,
            use_separate_reference_adapter=False,
            device="cpu",
        )
        self.model: torch.nn.Module = self.agent.actor
        self.optimizer: torch.optim.Optimizer = self.agent.optimizer._single_optimizer()
        seed_adapter(self.model, task.seed)
        self.shares = [len(portion) / len(calls) for portion in self.portions]
        self.work = rows_work([self.longest] * len(calls), task.window.trained_tokens)

    def accumulate(self, part: int) -> None:
        calls = self.portions[part]
        logged = [call.mu for call in calls if call.mu is not None]
        self.agent.learn(
            (*self._experiences(calls), torch.tensor([[c.advantage] for c in calls])),
            sampling_logps=[torch.from_numpy(mu) for mu in logged] or None,
        )

    def _experiences(self, calls: Sequence[Call]) -> tuple[list[Tensor], list[Tensor]]:
        ids, masks = [], []
        for call in calls:
            row = torch.full((1, self.longest), PADDING)
            row[:, : len(call)] = right_padded([call])
            mask = torch.zeros(1, self.longest - 1, dtype=torch.bool)
            mask[:, len(call.prompt) - 1 : len(call) - 1] = True
            ids.append(row)
            masks.append(mask)
        return ids, masks

    def update(self) -> None:
        """``learn`` has stepped with the window's last micro-batch."""


def open_session(task: Task, variant: str) -> Session:
    session: Any = AgileSession(task, checkpointing=variant == "checkpointing")
    return session  # type: ignore[no-any-return]
