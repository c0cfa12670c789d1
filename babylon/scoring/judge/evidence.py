"""Evidence: the recorded steps and the ground truth of a validated artifact, for the judge."""

from collections.abc import Collection
from statistics import fmean

import msgspec
import polars as pl

from babylon.core.artifacts import iter_artifact, read_artifact
from babylon.core.settings import JudgeSettings
from babylon.core.trajectories import PLAIN, Trajectory, read_trajectories
from babylon.core.types import Artifact
from babylon.scoring.judge.condense import condense
from babylon.scoring.judge.judgment import (
    BLOCK_SIZES,
    GroundTruth,
    JudgeConfig,
    JudgedTrajectory,
    Method,
    RecordedStep,
    load_rubric,
)
from babylon.scoring.judge.prompt import count_tokens

_SAMPLE = 100  # trajectories; condensing takes milliseconds, and more change the mean little
_STEPS = msgspec.json.Decoder(tuple[RecordedStep, ...])


class _Knowledge(msgspec.Struct, frozen=True):
    game_knowledge: dict[str, object] = {}
    market_outcomes: list[dict[str, object]] = []


def read_evidence(artifact: Artifact) -> tuple[list[JudgedTrajectory], GroundTruth]:
    """Return the trajectories of a validated artifact, in its order, and the window's outcomes."""
    trajectories = read_trajectories(artifact)
    columns = read_artifact(artifact, ["knowledge_json", "game_json"])
    knowledge = [msgspec.json.decode(text, type=_Knowledge) for text in columns["knowledge_json"]]
    judged = [
        JudgedTrajectory(
            trajectory=trajectory, steps=_STEPS.decode(steps), knowledge=known.game_knowledge
        )
        for trajectory, steps, known in zip(
            trajectories, columns["game_json"], knowledge, strict=True
        )
    ]
    outcomes = knowledge[0].market_outcomes if knowledge else []  # every row has the same
    return judged, GroundTruth(outcomes=tuple(outcomes))


def saved_tokens(
    scorer: str, judge: JudgeSettings, artifact: Artifact, dropped: Collection[str]
) -> int:
    """Estimate the prompt tokens that the judge saves by not seeing the dropped trajectories.

    Each trajectory counts once, without the parts that its group's prompts share. Of many
    trajectories only a sample is counted. A scorer that asks no judge saves none.
    """
    if scorer not in BLOCK_SIZES or not dropped:
        return 0
    method: Method = scorer
    rubric = load_rubric(judge.rubric)
    config = JudgeConfig(method=method, rubric=rubric, context_tokens=judge.context_tokens)
    limit = config.prompt_tokens // BLOCK_SIZES[method]
    sample = sorted(dropped)[:: -(-len(dropped) // _SAMPLE)]
    tokens = []
    for frame in iter_artifact(artifact, [*PLAIN, "game_json"]):
        for row in frame.filter(pl.col("trajectory_id").is_in(sample)).iter_rows(named=True):
            steps = _STEPS.decode(row.pop("game_json"))
            trajectory = Trajectory(**row, calls=())
            judged = JudgedTrajectory(trajectory=trajectory, steps=steps, knowledge={})
            tokens.append(count_tokens(condense(judged, (), limit)))
    return round(fmean(tokens) * len(dropped))
