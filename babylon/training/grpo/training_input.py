"""Training input: trajectories with a score, and the exact tokens of their calls.

A call is one prompt and one completion. Several calls make a trajectory, and the trajectories of
one (window, scenario) make a group. Only completion tokens are trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTokens:
    """Tokens of one logged call.

    ``logprobs`` ``[T]`` are the behaviour policy's, None if unknown. ``policy_version`` is the
    behaviour policy's version. ``step`` is the trajectory's decision that it is of.
    ``hindsight`` is the prompt with feedback on this reply, as the teacher of self-distillation
    reads it. It is forwarded for the teacher's logprobs and never trained.
    """

    prompt: Sequence[int]
    completion: Sequence[int]
    logprobs: Sequence[float] | None
    temperature: float = 1.0
    policy_version: int | None = None
    step: int = 0
    hindsight: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not self.prompt or not self.completion:
            raise ValueError(
                f"a call needs prompt and completion tokens, got {len(self.prompt)} and"
                f" {len(self.completion)}: leave it out of the batch"
            )
        if self.logprobs is not None and len(self.logprobs) != len(self.completion):
            raise ValueError(
                f"{len(self.completion)} completion tokens but {len(self.logprobs)} logprobs:"
                " pass None when they were not logged exactly"
            )
        if self.temperature <= 0:
            raise ValueError(f"temperature {self.temperature} cannot be trained: it must be > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """A trajectory's score, calls, and the group that it is compared in.

    ``rewards``: step → the part of the score that it earned; empty if that is unknown.
    """

    trajectory_id: str
    group: str
    score: float
    calls: Sequence[CallTokens]
    rewards: Mapping[int, float] = field(default_factory=dict)


def teachable(
    trajectories: Sequence[ScoredTrajectory], advantage: Mapping[str, object]
) -> list[ScoredTrajectory]:
    """The trajectories with an advantage, and of the others the calls with words for a teacher."""
    found = []
    for own in trajectories:
        if own.trajectory_id not in advantage:
            own = replace(own, calls=[call for call in own.calls if call.hindsight])
        if own.calls:
            found.append(own)
    return found
