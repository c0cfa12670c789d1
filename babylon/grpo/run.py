"""An update under way: everything that a train step needs, and the report."""

from dataclasses import dataclass
from typing import Any

import torch

from babylon.grpo.memory import Portions
from babylon.grpo.record import Logged, Record
from babylon.grpo.window import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Only model, optimiser, portions and record change, and those in place."""

    model: Any
    optimizer: torch.optim.Optimizer
    window: Window
    portions: Portions
    logged: Logged
    record: Record
