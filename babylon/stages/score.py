"""Stage ``score``: one number a trajectory, stored and added to the artifact."""

import asyncio
from collections.abc import Sequence
from statistics import fmean

import polars as pl

from babylon.core.artifacts import rewrite_artifact
from babylon.core.errors import ConfigError, WindowNotReadyError
from babylon.core.failpoints import failpoint
from babylon.core.settings import Settings
from babylon.core.trajectories import Trajectory, read_trajectories
from babylon.core.types import Rejection, Scored, Thinned
from babylon.scoring.scorer import Score, ScoringContext, load_scorer, rewards_json, score
from babylon.stages.fingerprint import scoring_fingerprint
from babylon.stages.validate import count_reasons, too_few_agents
from babylon.stages.watch import watch_scores
from babylon.store import Store
from babylon.store import scores as stored
from babylon.store.connection import guarded
from babylon.store.judgments import write_to_game


async def score_window(store: Store, settings: Settings, thinned: Thinned) -> Scored:
    """Score the window's trajectories with ``settings.scoring.scorer``.

    Trajectories that the scorer rejects are left out and stored with their reasons.

    Raises:
        ConfigError: the scorer does not exist, or lacks a setting.
        ScoringError: the scorer failed; nothing was stored.
        WindowNotReadyError: the scorer rejected too many trajectories; the rejections are stored.
            Or the window looks like reward hacking; nothing was stored.
        BudgetSpentError: the judge's budget is spent; a later run tries again.
    """
    # Checked before scoring, because a judge costs money and the write comes last.
    if settings.scoring.write_back and not store.game_tables_ours:
        raise ConfigError(
            "JUDGE_WRITE_BACK is on, but the game's tables belong to another system and are never"
            " written: unset it; babylon.scores and babylon.judgments hold the same"
        )
    scorer = load_scorer(settings.scoring.scorer)
    trajectories = await asyncio.to_thread(read_trajectories, settings.home, thinned.artifact)
    context = ScoringContext(
        window_id=thinned.claim.window_id,
        settings=settings,
        store=store,
        artifact=thinned.artifact,
    )
    scores = await score(settings.scoring.scorer, scorer, trajectories, context)
    holds, minutes = settings.scoring.hold_on_hacking, settings.windows.minutes
    await watch_scores(store, thinned.claim, minutes, trajectories, scores, holds=holds)
    rejections = [given for given in scores if isinstance(given, Rejection)]
    agents = {t.agent_id for t, s in zip(trajectories, scores, strict=True) if isinstance(s, Score)}
    minimum = settings.windows.min_agents
    rows = _rows(settings.scoring.scorer, trajectories, scores)
    await stored.replace_scores(store, thinned.claim, rows, rejections)
    if rejections and len(agents) < minimum:
        window_id, rejected = thinned.claim.window_id, count_reasons(rejections)
        raise WindowNotReadyError(too_few_agents(window_id, len(agents), minimum, rejected))
    values = {row.trajectory_id: row.score for row in rows}
    named = pl.col("trajectory_id")
    column = named.replace_strict(values, return_dtype=pl.Float64)
    steps = named.replace_strict(rewards_json(trajectories, scores), return_dtype=pl.String)
    artifact = await asyncio.to_thread(
        rewrite_artifact,
        settings.home,
        thinned.artifact,
        lambda frame: frame.filter(named.is_in(list(values))).with_columns(
            score=column, rewards_json=steps
        ),
        stage="scored",
    )
    if rejections:
        context.metrics["rejected"] = len(rejections)
    if thinned.saved_judge_tokens:
        context.metrics["saved_tokens"] = thinned.saved_judge_tokens
    if settings.scoring.write_back:
        scenarios = {t.trajectory_id: t.scenario_id for t in trajectories}
        failpoint("write_back.before")
        async with guarded(store, thinned.claim) as connection:
            await write_to_game(connection, scenarios, rows, context.metrics)
        failpoint("write_back.after")
    return Scored(
        claim=thinned.claim,
        artifact=artifact,
        eligible=len(rows) + thinned.dropped,
        agents=len(agents),
        scorer=settings.scoring.scorer,
        avg_reward=fmean(values.values()),
        metrics=context.metrics,
        held_out=thinned.held_out,
        outcomes=thinned.outcomes,
        fingerprint=scoring_fingerprint(settings),
    )


def _rows(
    scorer: str, trajectories: Sequence[Trajectory], scores: Sequence[Score | Rejection]
) -> list[stored.StoredScore]:
    return [
        stored.StoredScore(
            trajectory_id=trajectory.trajectory_id,
            scorer=scorer,
            score=given.value,
            components=given.components,
            low=given.low,
            high=given.high,
            reasons=given.reasons,
            seen=given.seen,
        )
        for trajectory, given in zip(trajectories, scores, strict=True)
        if isinstance(given, Score)
    ]
