"""The judge as scorers ``ruler``, ``preference`` and ``regression`` of the score stage.

When the budget does not allow what is wanted, less is done, in this order: fewer repetitions down
to one pass, one pass of the cheaper judge, the heuristic, and at last nothing: the window is left
for a later run. The level reached is among the window's metrics (``judge_level``).
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime

from babylon.core.errors import ScoringError
from babylon.core.settings import Settings
from babylon.core.trajectories import Trajectory
from babylon.scoring.judge.budget import Budget, BudgetSpentError, Limits
from babylon.scoring.judge.evidence import read_evidence
from babylon.scoring.judge.judge_client import JudgeClient, Price
from babylon.scoring.judge.judge_requirements import require_judge
from babylon.scoring.judge.judge_window import judge_window
from babylon.scoring.judge.judgment import JudgeConfig, Judgments, Level, Method
from babylon.scoring.judge.local_judge import MODEL, TEMPERATURE, local_judge
from babylon.scoring.judge.rubrics import load_rubric
from babylon.scoring.rewards.heuristic import heuristic
from babylon.scoring.scorer import Score, ScoringContext
from babylon.store.judgments import StoredJudgments, spent_on_window, spent_since

log = logging.getLogger(__name__)


async def ruler(trajectories: Sequence[Trajectory], context: ScoringContext) -> list[Score]:
    """Listwise: the judge compares up to six trajectories and scores each."""
    return await _score("ruler", trajectories, context)


async def preference(trajectories: Sequence[Trajectory], context: ScoringContext) -> list[Score]:
    """Pairwise: the judge names the better of two, many times."""
    return await _score("preference", trajectories, context)


async def regression(trajectories: Sequence[Trajectory], context: ScoringContext) -> list[Score]:
    """Pointwise: the judge scores each trajectory by itself."""
    return await _score("regression", trajectories, context)


async def _score(
    method: Method, trajectories: Sequence[Trajectory], context: ScoringContext
) -> list[Score]:
    settings = context.settings
    require_judge(settings)
    try:
        async with asyncio.timeout(settings.judge.timeout_s):
            return await _down_the_ladder(method, trajectories, context)
    except TimeoutError as error:
        raise ScoringError(
            f"window {context.window_id} was not judged within {settings.judge.timeout_s:g} s"
            " (JUDGE_TIMEOUT_SECONDS): what was judged is kept, run the window again"
        ) from error


async def _down_the_ladder(
    method: Method, trajectories: Sequence[Trajectory], context: ScoringContext
) -> list[Score]:
    settings = context.settings
    try:
        judgments = await _judge(method, context, cheaper=False)
    except BudgetSpentError as error:
        log.warning("window %s: %s", context.window_id, error)
        try:
            if settings.judge.cheaper_model is None:
                raise
            judgments = await _judge(method, context, cheaper=True)
        except BudgetSpentError as spent:
            return await _by_heuristic(trajectories, context, spent)
    cheaper = judgments.level == Level.CHEAPER
    name = settings.judge.cheaper_model if cheaper else settings.judge.model
    await _report(
        context,
        judgments.level,
        model=str(name or settings.judge.model_path),
        reliability=judgments.reliability,
    )
    log.info(
        "window %s judged (%s): %d requests, %d tokens, $%.4f bought now",
        context.window_id,
        judgments.level,
        judgments.requests,
        judgments.tokens,
        judgments.usd,
    )
    return [
        Score(value=one.score, low=one.low, high=one.high, reasons=one.reasons, seen=one.seen)
        for one in judgments.scores
    ]


async def _judge(method: Method, context: ScoringContext, *, cheaper: bool) -> Judgments:
    """Open the judge, and judge with what is left of the budget."""
    settings, store = context.settings, context.store
    judged, truth = await asyncio.to_thread(read_evidence, context.artifact)
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    budget = Budget(
        Limits(tokens=settings.judge.window_tokens, usd=settings.judge.window_usd),
        Limits(tokens=settings.judge.day_tokens, usd=settings.judge.day_usd),
        spent_on_window=await spent_on_window(store, context.window_id),
        spent_today=await spent_since(store, midnight),
    )
    config = JudgeConfig(
        method=method,
        rubric=load_rubric(settings.judge.rubric),
        context_tokens=settings.judge.context_tokens,
        passes=settings.judge.passes,
        seed=settings.seed,
        repeats=not cheaper,
    )
    async with AsyncExitStack() as stack:
        client, config = await open_judge(stack, settings, config, cheaper=cheaper)
        judgments = await judge_window(
            client,
            judged,
            truth,
            config,
            cache=StoredJudgments(store, context.window_id),
            budget=budget,
        )
    return replace(judgments, level=Level.CHEAPER) if cheaper else judgments


async def open_judge(
    stack: AsyncExitStack, settings: Settings, config: JudgeConfig, *, cheaper: bool
) -> tuple[JudgeClient, JudgeConfig]:
    """The judge that the settings name, open until the stack closes; of a local one the context
    is that of its checkpoint."""
    model, base_url, name = settings.judge.model, settings.judge.base_url, None
    price = Price(
        prompt_usd=settings.judge.prompt_usd, completion_usd=settings.judge.completion_usd
    )
    temperature, timeout_s = settings.judge.temperature, 120.0
    if cheaper:
        model = settings.judge.cheaper_model
        price = Price(
            prompt_usd=settings.judge.cheaper_prompt_usd,
            completion_usd=settings.judge.cheaper_completion_usd,
        )
    elif settings.judge.model_path is not None:
        local = await stack.enter_async_context(local_judge(settings, settings.judge.model_path))
        model, base_url, name, price = MODEL, local.base_url, local.name, Price()
        temperature = TEMPERATURE if temperature is None else temperature
        timeout_s = settings.judge.timeout_s
        config = replace(config, context_tokens=min(config.context_tokens, local.context_tokens))
    key = settings.judge.api_key
    client = JudgeClient(
        model=model or "",
        base_url=base_url,
        api_key=key.get_secret_value() if key else "none",
        name=name,
        price=price,
        temperature=temperature,
        concurrency=settings.judge.concurrency,
        timeout_s=timeout_s,
    )
    return await stack.enter_async_context(client), config


async def _by_heuristic(
    trajectories: Sequence[Trajectory], context: ScoringContext, spent: BudgetSpentError
) -> list[Score]:
    """The heuristic's scores, where they are allowed and would teach anything."""
    scores = heuristic(trajectories)
    groups: dict[str, set[float]] = {}
    for trajectory, score in zip(trajectories, scores, strict=True):
        groups.setdefault(trajectory.scenario_id, set()).add(score.value)
    if not context.settings.judge.heuristic_fallback or all(
        len(values) < 2 for values in groups.values()
    ):
        raise spent
    await _report(context, Level.HEURISTIC, model="heuristic", reliability=0.0)
    return [replace(score, reasons=(f"scored by the heuristic: {spent}",)) for score in scores]


async def _report(context: ScoringContext, level: Level, *, model: str, reliability: float) -> None:
    """What judging the window cost in all, earlier runs included."""
    spent = await spent_on_window(context.store, context.window_id)
    context.metrics.update(
        level=str(level),
        reliability=reliability,
        requests=spent.requests,
        tokens=spent.tokens,
        usd=spent.usd,
        rubric=load_rubric(context.settings.judge.rubric).version,
        model=model,
    )
