"""Stage ``score``: one number a trajectory, stored and added to the artifact."""

import asyncio
from statistics import fmean

import polars as pl

from babylon.artifacts import rewrite_artifact
from babylon.rewards.registry import load_scorer
from babylon.rewards.scorer import score
from babylon.settings import Settings
from babylon.store import Store
from babylon.store import scores as stored
from babylon.trajectories import read_trajectories
from babylon.types import Scored, Thinned


async def score_window(store: Store, settings: Settings, thinned: Thinned) -> Scored:
    """Score the window's trajectories with ``settings.scorer``.

    Raises:
        ConfigError: there is no such scorer.
        ScoringError: the scorer failed; nothing was stored.
    """
    scorer = load_scorer(settings.scorer)
    trajectories = await asyncio.to_thread(read_trajectories, thinned.artifact)
    scores = await score(settings.scorer, scorer, trajectories)
    values = {
        trajectory.trajectory_id: given.value
        for trajectory, given in zip(trajectories, scores, strict=True)
    }
    column = pl.col("trajectory_id").replace_strict(values, return_dtype=pl.Float64)
    artifact = await asyncio.to_thread(
        rewrite_artifact,
        thinned.artifact,
        settings.artifacts,
        lambda frame: frame.with_columns(score=column),
        stage="scored",
    )
    await stored.replace_scores(
        store,
        thinned.claim,
        [
            stored.Score(
                trajectory_id=trajectory.trajectory_id,
                scorer=settings.scorer,
                score=given.value,
                components=given.components,
            )
            for trajectory, given in zip(trajectories, scores, strict=True)
        ],
    )
    return Scored(
        claim=thinned.claim,
        artifact=artifact,
        eligible=thinned.artifact.rows + thinned.dropped,
        agents=thinned.agents,
        scorer=settings.scorer,
        avg_reward=fmean(values.values()),
    )
