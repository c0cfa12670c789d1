"""What every trainer is given, and the signature it has; ``babylon.stages.train`` chooses one by
name."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from babylon.core.settings import Settings
from babylon.core.trajectories import TrainingRow
from babylon.core.types import Claim
from babylon.store.connection import Store
from babylon.store.policies import Policy

if TYPE_CHECKING:
    from babylon.training.grpo.config import TrainerConfig
    from babylon.training.update import Update

Progress = Callable[[int, int], None]  # train steps done, of at most so many


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainInput:
    """One window to train ``parent`` on.

    ``target`` and ``progress_directory`` belong to this claim alone. The checkpoint appears in
    ``target`` complete or not at all; an update that is killed goes on from
    ``progress_directory``, which holds what the window's claim before left there.
    """

    store: Store
    settings: Settings
    claim: Claim
    parent: Policy
    rows: Sequence[TrainingRow]
    target: Path
    progress_directory: Path
    config: "TrainerConfig"
    staleness: Mapping[int, int]  # policy version → updates that it lies behind the parent
    behaviours: Mapping[int, str]  # policy version → its checkpoint, where that is at hand
    progress: Progress | None


Updater = Callable[[TrainInput], Awaitable["Update"]]
"""Writes ``target`` and reports; commits nothing.

Raises:
    WindowNotReadyError: the window teaches nothing; nothing was written.
    TrainingError: the update failed; nothing was written.
"""
