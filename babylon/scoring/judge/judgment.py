"""What goes into a judgment and what comes out of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from babylon.core.trajectories import Trajectory
from babylon.scoring.judge.rubrics import Rubric

Method = Literal["ruler", "preference", "regression"]
BLOCK_SIZES: dict[Method, int] = {"ruler": 6, "preference": 2, "regression": 1}


class Level(StrEnum):
    """How much judging the budget allowed, best first: the order of degradation."""

    FULL = "full"  # repeated where unstable
    ONE_PASS = "one-pass"  # each trajectory once, anchors twice
    CHEAPER = "cheaper"  # one pass of JUDGE_CHEAPER_MODEL
    HEURISTIC = "heuristic"  # no judge at all


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedTrajectory:
    """A trajectory as the judge may see it: with its steps as the game recorded them.

    ``knowledge`` is its ground truth (the game's ``gameKnowledge``).
    """

    trajectory: Trajectory
    steps: tuple[Mapping[str, Any], ...]
    knowledge: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroundTruth:
    """What really happened in the window: rows of ``market_outcomes``, by the game's names."""

    outcomes: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeConfig:
    """How to judge.

    ``passes``: how often a trajectory is shown at most, in the mean of its group.
    ``context_tokens`` is the judge's context, of which a prompt takes at most 60 %. ``repeats`` is
    off where the budget allows one pass only.
    """

    method: Method
    rubric: Rubric
    context_tokens: int = 128_000
    passes: float = 2.5
    seed: int = 0
    repeats: bool = True

    @property
    def prompt_tokens(self) -> int:
        """Most tokens that a prompt may have, by our count."""
        return int(0.6 * self.context_tokens)

    @property
    def completion_tokens(self) -> int:
        """Most tokens that an answer may have; a judge that thinks first needs many."""
        return min(4096, self.context_tokens // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedScore:
    """One trajectory's score in [0, 1], its interval, the judge's reasons and what it saw."""

    trajectory_id: str
    score: float
    low: float
    high: float
    reasons: tuple[str, ...]
    seen: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgments:
    """A window's scores in the order asked for, and what was paid for them now.

    ``requests``, ``tokens`` and ``usd`` count replies bought in this run: none of a run repeated.
    ``reliability`` is the judge's, 0 to 1, the mean over the groups.
    """

    scores: tuple[JudgedScore, ...]
    level: Level
    reliability: float
    requests: int
    prompt_tokens: int
    completion_tokens: int
    usd: float

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens
