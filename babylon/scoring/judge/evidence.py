"""Evidence: the recorded steps and the ground truth of a validated artifact, for the judge."""

from collections.abc import Collection
from statistics import fmean

import msgspec
import polars as pl

from babylon.core.artifacts import iter_artifact
from babylon.core.errors import reason_of
from babylon.core.home import Home
from babylon.core.settings import JudgeSettings
from babylon.core.trajectories import PLAIN, Trajectory, iter_trajectories
from babylon.core.types import Artifact, Rejection
from babylon.quality.decode import Reason
from babylon.scoring.judge.condense import condense
from babylon.scoring.judge.judgment import (
    LIST_SIZE,
    METHOD,
    GroundTruth,
    JudgeConfig,
    JudgedTrajectory,
    RecordedStep,
    load_rubric,
)
from babylon.scoring.judge.prompt import count_tokens

_SAMPLE = 100  # trajectories; condensing takes milliseconds, and more change the mean little
_STEPS = msgspec.json.Decoder(tuple[RecordedStep, ...])


class _Knowledge(msgspec.Struct, frozen=True):
    game_knowledge: dict[str, object] = {}
    market_outcomes: list[dict[str, object]] = []


_KNOWLEDGE = msgspec.json.Decoder(_Knowledge)


def read_evidence(
    home: Home, artifact: Artifact
) -> tuple[list[JudgedTrajectory], GroundTruth, list[Rejection]]:
    """Return the trajectories of a validated artifact, in its order, and the window's outcomes.

    Trajectories whose steps or ground truth cannot be decoded come last, with the reason.
    """
    frames = iter_artifact(home, artifact, ["knowledge_json", "game_json"])
    columns = (row for frame in frames for row in frame.iter_rows())
    judged: list[JudgedTrajectory] = []
    unreadable: list[Rejection] = []
    outcomes: list[dict[str, object]] = []
    for trajectory, (knowledge, steps) in zip(
        iter_trajectories(home, artifact), columns, strict=True
    ):
        try:
            known = _KNOWLEDGE.decode(knowledge)
            one = JudgedTrajectory(
                trajectory=trajectory, steps=_STEPS.decode(steps), knowledge=known.game_knowledge
            )
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            unreadable.append(
                Rejection(
                    trajectory_id=trajectory.trajectory_id,
                    reason=Reason.NOT_READABLE,
                    detail=f"its steps or ground truth cannot be decoded: {reason_of(error)}",
                )
            )
        else:
            judged.append(one)
            outcomes = known.market_outcomes  # every row has the same
    return judged, GroundTruth(outcomes=tuple(outcomes)), unreadable


def saved_tokens(
    scorer: str, judge: JudgeSettings, home: Home, artifact: Artifact, dropped: Collection[str]
) -> int:
    """Estimate the prompt tokens that the judge saves by not seeing the dropped trajectories.

    Each trajectory counts once, without the parts that its group's prompts share. Of many
    trajectories only a sample is counted, and none that cannot be read. A scorer that asks no judge
    saves none.
    """
    if scorer != METHOD or not dropped:
        return 0
    config = JudgeConfig(rubric=load_rubric(judge.rubric), context_tokens=judge.context_tokens)
    limit = config.prompt_tokens // LIST_SIZE
    sample = sorted(dropped)[:: -(-len(dropped) // _SAMPLE)]
    tokens = []
    for frame in iter_artifact(home, artifact, [*PLAIN, "game_json"]):
        for row in frame.filter(pl.col("trajectory_id").is_in(sample)).iter_rows(named=True):
            game = row.pop("game_json")
            try:
                steps = _STEPS.decode(game)
                trajectory = Trajectory(**row, calls=())
                judged = JudgedTrajectory(trajectory=trajectory, steps=steps, knowledge={})
                tokens.append(count_tokens(condense(judged, (), limit)))
            except Exception:  # an estimate must not fail for what one trajectory holds
                continue
    return round(fmean(tokens or [0]) * len(dropped))
