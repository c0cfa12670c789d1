"""What a judge is spared: tokens of trajectories that are dropped before it sees them."""

from collections.abc import Collection
from statistics import fmean
from typing import Any

import msgspec
import polars as pl

from babylon.core.artifacts import iter_artifact
from babylon.core.settings import Settings
from babylon.core.trajectories import PLAIN, Trajectory
from babylon.core.types import Artifact
from babylon.scoring.judge.condense import condense
from babylon.scoring.judge.judgment import BLOCK_SIZES, JudgeConfig, JudgedTrajectory, Method
from babylon.scoring.judge.prompt_text import count_tokens
from babylon.scoring.judge.rubrics import load_rubric

_SAMPLE = 100  # condensing takes milliseconds; more would say the same


def saved_tokens(settings: Settings, artifact: Artifact, dropped: Collection[str]) -> int:
    """Prompt tokens (the judge's own count) of the dropped trajectories, each shown once.

    An estimate: of many a sample is counted, without what the group's prompts share. A scorer that
    asks no judge saves none.
    """
    if settings.scoring.scorer not in BLOCK_SIZES or not dropped:
        return 0
    method: Method = settings.scoring.scorer
    rubric = load_rubric(settings.judge.rubric)
    config = JudgeConfig(method=method, rubric=rubric, context_tokens=settings.judge.context_tokens)
    limit = config.prompt_tokens // BLOCK_SIZES[method]
    sample = sorted(dropped)[:: -(-len(dropped) // _SAMPLE)]
    shown = pl.col("trajectory_id").is_in(sample)
    tokens = [
        count_tokens(condense(_judged(row), (), limit))
        for frame in iter_artifact(artifact, [*PLAIN, "game_json"])
        for row in frame.filter(shown).iter_rows(named=True)
    ]
    return round(fmean(tokens) * len(dropped))


def _judged(row: dict[str, Any]) -> JudgedTrajectory:
    steps = msgspec.json.decode(row.pop("game_json"), type=tuple[dict[str, Any], ...])
    return JudgedTrajectory(trajectory=Trajectory(**row, calls=()), steps=steps, knowledge={})
