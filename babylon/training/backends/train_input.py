"""The input and the signature that all trainers share."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from babylon.core.preferences import DecisionWords, PromptReplies
from babylon.core.settings import Settings
from babylon.core.trajectories import TrainingRow
from babylon.core.types import Claim
from babylon.store.connection import Store
from babylon.store.policies import Policy
from babylon.training.update_result import Update

Progress = Callable[[int, int], None]  # train steps done, and their highest possible number


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainInput:
    """One window to train ``parent`` on.

    ``target`` and ``progress_directory`` belong to one claim. The checkpoint appears in ``target``
    complete or not at all. ``progress_directory`` holds the progress of the window's earlier
    claim, if there is any; an update that was killed resumes from it.
    """

    store: Store
    settings: Settings
    claim: Claim
    parent: Policy
    rows: Sequence[TrainingRow]
    target: Path
    progress_directory: Path
    staleness: Mapping[int, int]  # policy version → number of updates between it and the parent
    scored: str  # digest of the scored window
    optimizer: str  # checkpoint whose optimiser goes on: the parent's, or a rejected child's
    progress: Progress | None
    replies: Sequence[PromptReplies] = ()  # sampled for this update (OBJECTIVE=dpo)
    words: Sequence[DecisionWords] = ()  # feedback on the rows' decisions (OBJECTIVE=sdpo)
    resize: bool = False  # the parent's adapter gets the settings' rank


Updater = Callable[[TrainInput], Awaitable[Update]]
"""Write ``target`` and return the report. Commit nothing.

Raises:
    WindowNotReadyError: nothing in the window can be trained; nothing was written.
    TrainingError: the update failed; nothing was written.
"""
