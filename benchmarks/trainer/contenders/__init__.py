"""The measured trainers, one a file, and the registry of their variants.

A contender is imported only in its own process, so a peer that is not installed is listed as such.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from transformers import PreTrainedConfig

from babylon.training.grpo.portion_size import portion_tokens
from benchmarks.trainer.cases import Window
from benchmarks.trainer.flops import Work
from benchmarks.trainer.models import Tuning

PARTS = 10  # of a padded window, of which a repetition times one
CALLS = (1, 2, 3, 6)  # micro-batches that peers choose from


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A training task. ``micro_batch`` counts calls forwarded at once, in our trainer tokens."""

    config: PreTrainedConfig
    window: Window
    tuning: Tuning
    seed: int
    micro_batch: int
    grad_clip: float
    parts: int = PARTS


class Session(Protocol):
    """A model and its optimiser, ready to be trained on one window in parts.

    ``shares`` are the parts of the window's work that ``accumulate`` does at a time, together 1;
    ``work`` is what the whole window makes this trainer compute, padding included.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    work: Work

    @property
    def shares(self) -> Sequence[float]: ...

    def accumulate(self, part: int) -> None:
        """Forward, loss and backward of a part; gradients add up."""

    def update(self) -> None:
        """Clip, one AdamW step, gradients to zero."""


class Opener(Protocol):
    """The signature of ``open_session`` in a contender's module."""

    def __call__(self, task: Task, variant: str) -> Session: ...


Peer = Literal["babylon", "naive", "trl", "agilerl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One row of the table. ``tuning`` overrides the run's where a trainer knows only one."""

    name: str
    peer: Peer
    variant: str = ""
    tuning: Tuning | None = None
    buckets: bool = False  # differs from its sibling only where calls differ in length

    @property
    def in_tokens(self) -> bool:
        """True if its micro-batches count tokens, not calls."""
        return self.peer == "babylon"

    def sizes(self, config: PreTrainedConfig) -> Sequence[int]:
        """The micro-batches to choose from. Ours has only its default."""
        return (portion_tokens("cpu", config.hidden_size),) if self.in_tokens else CALLS

    def open(self, task: Task) -> Session:
        module = importlib.import_module(f"benchmarks.trainer.contenders.{self.peer}_session")
        opener: Opener = module.open_session
        return opener(task, self.variant)

    def installed(self) -> bool:
        return self.peer in ("babylon", "naive") or bool(importlib.util.find_spec(self.peer))


CONTENDERS = (
    Contender(name="babylon", peer="babylon"),
    Contender(name="naive, length-bucketed", peer="naive"),
    Contender(name="TRL", peer="trl"),
    Contender(name="TRL, length-bucketed", peer="trl", variant="buckets", buckets=True),
    Contender(name="TRL, completion head", peer="trl", variant="head"),
    Contender(
        name="TRL, completion head, length-bucketed",
        peer="trl",
        variant="head buckets",
        buckets=True,
    ),
    Contender(name="babylon, LoRA", peer="babylon", tuning="lora"),
    Contender(name="AgileRL, LoRA", peer="agilerl", variant="checkpointing", tuning="lora"),
    Contender(name="AgileRL, LoRA, no checkpointing", peer="agilerl", tuning="lora"),
)
