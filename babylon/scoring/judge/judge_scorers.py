"""Scorers that ask the judge: ``ruler``, ``preference`` and ``regression``.

If the budget is too small, the scorer degrades in this order: fewer repetitions, one pass of the
cheaper judge, the heuristic, and an error that leaves the window to a later run. The metric
``judge_level`` of the window names the level reached.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from babylon.core.errors import ScoringError
from babylon.core.settings import JudgeSettings
from babylon.core.trajectories import Trajectory
from babylon.core.types import Rejection
from babylon.scoring.judge.budget import Budget, BudgetLimits, BudgetSpentError
from babylon.scoring.judge.evidence import read_evidence
from babylon.scoring.judge.judge_client import MODEL, TEMPERATURE, JudgeClient, Price, local_judge
from babylon.scoring.judge.judge_requirements import require_judge
from babylon.scoring.judge.judge_window import judge_window
from babylon.scoring.judge.judgment import JudgeConfig, Judgments, Level, Method, load_rubric
from babylon.scoring.judge.pace import Pace
from babylon.scoring.judge.reported_validity import judged_groups
from babylon.scoring.judge.validity import (
    WINDOWS,
    JudgedGroup,
    Trust,
    UnprovenJudgeError,
    agreement,
    evidence,
    learn,
)
from babylon.scoring.rewards.heuristic import heuristic
from babylon.scoring.scorer import Score, ScoringContext
from babylon.store import Store
from babylon.store.judge_validity import (
    JudgeIdentity,
    WindowValidity,
    judged_before,
    store_validity,
)
from babylon.store.judgments import StoredJudgments, total_spent

log = logging.getLogger(__name__)


async def _score(
    method: Method, trajectories: Sequence[Trajectory], context: ScoringContext
) -> list[Score | Rejection]:
    judge = context.settings.judge
    require_judge(method, judge)
    try:
        async with asyncio.timeout(judge.timeout_s):
            return await _score_within_budget(method, trajectories, context)
    except TimeoutError as error:
        raise ScoringError(
            f"window {context.window_id} was not judged within {judge.timeout_s:g} s"
            " (JUDGE_TIMEOUT_SECONDS): the judgments so far are stored, run the window again"
        ) from error


async def _score_within_budget(
    method: Method, trajectories: Sequence[Trajectory], context: ScoringContext
) -> list[Score | Rejection]:
    judge = context.settings.judge
    model = judge.model or str(judge.model_path)
    try:
        judgments = await _judge(method, context, cheaper=False)
    except BudgetSpentError as error:
        log.warning("window %s: %s", context.window_id, error)
        try:
            if judge.cheaper_model is None:
                raise
            judgments, model = await _judge(method, context, cheaper=True), judge.cheaper_model
        except BudgetSpentError as spent:
            return [*await _by_heuristic(trajectories, context, spent)]
    await _report(context, judgments.level, model=model, reliability=judgments.reliability)
    context.metrics["rejected"] = len(judgments.rejected)
    bought = (judgments.requests, judgments.tokens, judgments.usd)
    text = "window %s judged (%s): %d requests, %d tokens, $%.4f bought now"
    log.info(text, context.window_id, judgments.level, *bought)
    found: dict[str, Score | Rejection] = {
        one.trajectory_id: Score(
            value=one.score, low=one.low, high=one.high, reasons=one.reasons, seen=one.seen
        )
        for one in judgments.scores
    }
    found |= {one.trajectory_id: one for one in judgments.rejected}
    return [found[trajectory.trajectory_id] for trajectory in trajectories]


async def _judge(method: Method, context: ScoringContext, *, cheaper: bool) -> Judgments:
    judge, store = context.settings.judge, context.store
    home = context.settings.home
    judged, truth, unreadable = await asyncio.to_thread(read_evidence, home, context.artifact)
    budget = Budget(
        window=BudgetLimits(tokens=judge.window_tokens, usd=judge.window_usd),
        day=BudgetLimits(tokens=judge.day_tokens, usd=judge.day_usd),
    )
    config = JudgeConfig(
        method=method,
        rubric=load_rubric(judge.rubric),
        context_tokens=judge.context_tokens,
        reasoning_tokens=judge.reasoning_tokens,
        passes=judge.passes,
        seed=context.settings.seed,
        repeats=not cheaper,
    )
    log_file = context.settings.home.logs / "judge.log"
    async with open_judge(judge, config, log_file, cheaper=cheaper) as (client, config):
        by = JudgeIdentity(judge=client.name, method=method, rubric=config.rubric.version)
        before = await _groups_before(store, by, context.window_id)
        trust = await asyncio.to_thread(learn, before, ranks=method == "preference")
        judgments = await judge_window(
            client,
            judged,
            truth,
            config,
            ledger=StoredJudgments(store, context.window_id),
            budget=budget,
            trust=trust,
            retries=judge.retries,
            pace=Pace(judge.requests_per_minute, judge.tokens_per_minute),
        )
    await store_validity(
        store, WindowValidity(window_id=context.window_id, by=by, groups=judgments.groups)
    )
    await asyncio.to_thread(_require_proof, context, trust, judgments, before)
    # The judge never saw them, so they count neither for nor against it.
    judgments = replace(judgments, rejected=(*judgments.rejected, *unreadable))
    return replace(judgments, level=Level.CHEAPER) if cheaper else judgments


async def _groups_before(store: Store, by: JudgeIdentity, window_id: str) -> list[JudgedGroup]:
    rows = await judged_before(store, by, WINDOWS, without=window_id)
    return [group for row in rows for group in judged_groups(row)]


def _require_proof(
    context: ScoringContext, trust: Trust, judgments: Judgments, before: Sequence[JudgedGroup]
) -> None:
    """Report how far the judge agrees with outcomes.

    Raises:
        UnprovenJudgeError: its agreement may be chance.
    """
    needed = context.settings.judge.evidence
    shown = evidence([*judgments.groups, *before])
    context.metrics.update(evidence=shown, validity=trust.validity)
    for name, groups in (("window", judgments.groups), ("recent", [*judgments.groups, *before])):
        if (found := agreement(groups)) is not None:
            context.metrics[f"agreement_{name}"] = found.correlation
            context.metrics[f"agreement_{name}_low"] = found.low
            context.metrics[f"agreement_{name}_high"] = found.high
    if not shown >= needed:  # NaN too
        raise UnprovenJudgeError(
            f"the judge's scores may be chance: they agree with outcomes with evidence {shown:.3g},"
            f" and JUDGE_EVIDENCE asks for {needed:g}; the judgments are stored, and the window"
            " can be trained after more windows, or with another JUDGE_MODEL or JUDGE_EVIDENCE=0"
        )


@asynccontextmanager
async def open_judge(
    judge: JudgeSettings, config: JudgeConfig, log_file: Path, *, cheaper: bool = False
) -> AsyncIterator[tuple[JudgeClient, JudgeConfig]]:
    """Open the judge, and yield its client and its configuration.

    A local judge's context is at most that of its checkpoint. Its engine writes to ``log_file``.
    """
    model, base_url, name = judge.model, judge.base_url, None
    price = Price(prompt_usd=judge.prompt_usd, completion_usd=judge.completion_usd)
    temperature, timeout_s = judge.temperature, judge.request_timeout_s
    async with AsyncExitStack() as stack:
        if cheaper:
            model = judge.cheaper_model
            price = Price(
                prompt_usd=judge.cheaper_prompt_usd, completion_usd=judge.cheaper_completion_usd
            )
        elif judge.model_path is not None:
            local = await stack.enter_async_context(local_judge(judge.model_path, log_file))
            model, base_url, name, price = MODEL, local.base_url, local.name, Price()
            temperature = TEMPERATURE if temperature is None else temperature
            timeout_s = judge.timeout_s  # a local engine may be slow
            context_tokens = min(config.context_tokens, local.context_tokens)
            config = replace(config, context_tokens=context_tokens)
        key = judge.api_key
        client = JudgeClient(
            model=model or "",
            base_url=base_url,
            api_key=key.get_secret_value() if key else "none",
            name=name,
            price=price,
            temperature=temperature,
            concurrency=judge.concurrency,
            timeout_s=timeout_s,
        )
        yield await stack.enter_async_context(client), config


async def _by_heuristic(
    trajectories: Sequence[Trajectory], context: ScoringContext, spent: BudgetSpentError
) -> list[Score]:
    """Return the heuristic's scores."""
    scores = heuristic(trajectories)
    groups: dict[str, set[float]] = {}
    for trajectory, score in zip(trajectories, scores, strict=True):
        groups.setdefault(trajectory.scenario_id, set()).add(score.value)
    equal = all(len(values) < 2 for values in groups.values())
    if equal or not context.settings.judge.heuristic_fallback:
        raise spent
    await _report(context, Level.HEURISTIC, model="heuristic", reliability=0.0)
    return [replace(score, reasons=(f"scored by the heuristic: {spent}",)) for score in scores]


async def _report(context: ScoringContext, level: Level, *, model: str, reliability: float) -> None:
    """Write the judge's metrics, with the cost of all runs of the window."""
    spent = await total_spent(context.store, context.window_id)
    context.metrics.update(
        level=str(level),
        reliability=reliability,
        requests=spent.requests,
        tokens=spent.tokens,
        cached_tokens=spent.cached_tokens,
        usd=spent.usd,
        rubric=load_rubric(context.settings.judge.rubric).version,
        model=model,
    )


# Listwise: the judge compares up to six trajectories and scores each.
ruler = partial(_score, "ruler")
# Pairwise: the judge names the better of two, many times.
preference = partial(_score, "preference")
# Pointwise: the judge scores each trajectory by itself.
regression = partial(_score, "regression")
