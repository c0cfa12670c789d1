"""Input and output of a judgment.

Rubrics are the text files in ``rubrics/``, or a file of the user. A changed text is a new rubric.
The text is part of every prompt and therefore of every cache key, and every judgment stores the
rubric's name with the digest of its text.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from babylon.core.errors import ConfigError
from babylon.core.trajectories import Trajectory
from babylon.core.types import Rejection
from babylon.scoring.judge.canary_results import CanaryResult
from babylon.scoring.judge.validity import JudgedGroup

_BUILT_IN = Path(__file__).parent / "rubrics"
_READS = "judge.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rubric:
    """The judge's criteria in words. ``version`` is ``name@digest``."""

    name: str
    text: str

    @property
    def version(self) -> str:
        return f"{self.name}@{hashlib.sha256(self.text.encode()).hexdigest()[:8]}"


def rubric_names() -> list[str]:
    """Return the names of the built-in rubrics."""
    return sorted(path.stem for path in _BUILT_IN.glob("*.txt"))


def load_rubric(name: str) -> Rubric:
    """Return a rubric by name (``trading-v1``) or by path (any name that ends in ``.txt``).

    Raises:
        ConfigError: the rubric does not exist or is empty.
    """
    path = Path(name) if name.endswith(".txt") else _BUILT_IN / f"{name}.txt"
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"JUDGE_RUBRIC={name!r}: no such rubric ({error}): choose"
            f" {', '.join(rubric_names())} or the path of a .txt file"
        ) from error
    if not text:
        raise ConfigError(f"JUDGE_RUBRIC={name!r}: {path} is empty: write the criteria into it")
    return Rubric(name=path.stem, text=text)


def checkpoint_digest(path: Path) -> str:
    """Return a hash of the files' names, sizes and times, because other files are another judge."""
    stats = [(file.name, file.stat()) for file in sorted(path.iterdir()) if file.is_file()]
    seen = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats]
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:12]


RecordedStep: TypeAlias = Mapping[str, Any]
"""A step's JSON as the game recorded it. Its writers differ, so readers look up each key."""

METHOD = "ruler"  # of models, in stored rows; people's pairs have another
LIST_SIZE = 6  # trajectories in one prompt, at most


class Level(StrEnum):
    """Amount of judging that the budget allowed, best first."""

    FULL = "full"  # unstable trajectories repeated
    ONE_PASS = "one-pass"  # each trajectory once, anchors twice
    CHEAPER = "cheaper"  # one pass of JUDGE_CHEAPER_MODEL
    HEURISTIC = "heuristic"  # no judge


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedTrajectory:
    """A trajectory with its recorded steps and its ground truth (``gameKnowledge``)."""

    trajectory: Trajectory
    steps: tuple[RecordedStep, ...]
    knowledge: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroundTruth:
    """Ground truth of the window: rows of ``market_outcomes``, with the game's keys."""

    outcomes: tuple[Mapping[str, object], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeConfig:
    """Configuration of the judge.

    ``passes`` is the maximum number of times that a trajectory is shown, averaged over its group,
    half of it for a judge that reads single ones (``list_size`` 1).
    A prompt takes at most 60 % of the judge's ``context_tokens``. ``reasoning_tokens`` are the
    tokens that a judge's thoughts may take in a reply, before its answer. ``repeats`` is False if
    the budget allows one pass only.
    """

    rubric: Rubric
    list_size: int = LIST_SIZE
    context_tokens: int = 128_000
    reasoning_tokens: int = 0
    passes: float = 5.0
    seed: int = 0
    repeats: bool = True

    @property
    def prompt_tokens(self) -> int:
        """Maximum tokens of a prompt, as ``count_tokens`` counts them."""
        return int(0.6 * self.context_tokens)

    def completion_tokens(self, trajectories: int) -> int:
        """Return the maximum tokens of a reply about so many trajectories, thoughts included.

        An answer as asked for takes about a third of its part.
        """
        wanted = 200 + 150 * trajectories + self.reasoning_tokens
        return min(wanted, self.context_tokens - self.prompt_tokens)


class Reads(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a judge that was trained here, as the file ``judge.json`` of its checkpoint."""

    list_size: int
    context_tokens: int


def write_reads(checkpoint: Path, reads: Reads) -> None:
    """Write what the judge of a checkpoint can read."""
    (checkpoint / _READS).write_bytes(msgspec.json.encode(reads))


def fitting(config: JudgeConfig, checkpoint: Path, context_tokens: int) -> JudgeConfig:
    """Return the configuration for the judge of a checkpoint, whose model has this context."""
    path = checkpoint / _READS
    reads = msgspec.json.decode(path.read_bytes(), type=Reads) if path.exists() else None
    return replace(
        config,
        list_size=reads.list_size if reads else config.list_size,
        context_tokens=min(
            config.context_tokens, context_tokens, *([reads.context_tokens] if reads else [])
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedScore:
    """One trajectory's score in [0, 1], its interval, the judge's reasons and the text it saw.

    ``opinions``: judge → its own score, if a panel judged.
    """

    trajectory_id: str
    score: float
    low: float
    high: float
    reasons: tuple[str, ...]
    seen: str
    opinions: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgments:
    """A window's scores in the order of its trajectories, and the cost of this run.

    Trajectories that cannot be judged are ``rejected`` and have no score. ``requests`` counts the
    replies bought in this run, so a repeated run counts none. ``tokens`` and ``usd`` include
    requests without a reply. ``reliability`` is the mean of the judge's reliability, 0 to 1, over
    the groups. ``groups`` are the judge's opinions beside the outcomes, for later windows, and
    ``canaries`` its answers to planted plays.
    """

    scores: tuple[JudgedScore, ...]
    rejected: tuple[Rejection, ...]
    groups: tuple[JudgedGroup, ...]
    canaries: tuple[CanaryResult, ...]
    level: Level
    reliability: float
    requests: int
    tokens: int
    usd: float
