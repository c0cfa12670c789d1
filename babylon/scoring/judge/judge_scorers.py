"""The scorer that asks the judge: ``ruler``.

If the budget is too small, the scorer degrades in this order: fewer repetitions, one pass of the
cheaper judge, the heuristic, and an error that leaves the window to a later run. The metric
``judge_level`` of the window names the level reached.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import pstdev

from babylon.core.errors import ScoringError, ServingError
from babylon.core.settings import JudgeSettings
from babylon.core.trajectories import Trajectory
from babylon.core.types import Rejection
from babylon.scoring.judge.budget import Budget, BudgetLimits, BudgetSpentError, InFlight
from babylon.scoring.judge.canary_results import CanaryResult, summarise_canaries
from babylon.scoring.judge.evidence import read_evidence
from babylon.scoring.judge.judge_client import MODEL, TEMPERATURE, JudgeClient, Price, local_judge
from babylon.scoring.judge.judge_panel import MemberJudgment, together
from babylon.scoring.judge.judge_requirements import require_judge
from babylon.scoring.judge.judge_window import BLIND, judge_window
from babylon.scoring.judge.judgment import (
    METHOD,
    GroundTruth,
    JudgeConfig,
    JudgedScore,
    JudgedTrajectory,
    Judgments,
    Level,
    fitting,
    load_rubric,
)
from babylon.scoring.judge.pace import Pace
from babylon.scoring.judge.panel_members import panel_members
from babylon.scoring.judge.reported_validity import canary_results, judged_groups
from babylon.scoring.judge.validity import (
    WINDOWS,
    JudgedGroup,
    Trust,
    UnprovenJudgeError,
    agreement,
    evidence,
    has_outcomes,
    learn,
    log_canaries,
    log_evidence,
    most_evidence,
)
from babylon.scoring.rewards.heuristic import heuristic
from babylon.scoring.scorer import FALLBACK, Score, ScoringContext
from babylon.store import Store
from babylon.store.judge_validity import (
    JudgeIdentity,
    WindowValidity,
    evidence_before,
    judged_before,
    store_validity,
)
from babylon.store.judgments import StoredJudgments, total_spent
from babylon.store.people import read_answers
from babylon.training.grpo.advantage import MIN_GROUP_STD

log = logging.getLogger(__name__)


async def ruler(
    trajectories: Sequence[Trajectory], context: ScoringContext
) -> list[Score | Rejection]:
    """Return the judge's scores of lists of up to six trajectories, and what it cannot judge."""
    judge = context.settings.judge
    require_judge("ruler", judge)
    model = judge.model or str(judge.model_path)
    try:
        judgments = await _judge(context, cheaper=False)
    except BudgetSpentError as error:
        log.warning("window %s: %s", context.window_id, error)
        try:
            if judge.cheaper_model is None:
                raise
            judgments, model = await _judge(context, cheaper=True), judge.cheaper_model
        except BudgetSpentError as spent:
            return [*await _by_heuristic(trajectories, context, spent)]
    await _report(context, judgments.level, model=model, reliability=judgments.reliability)
    bought = (judgments.requests, judgments.tokens, judgments.usd)
    text = "window %s judged (%s): %d requests, %d tokens, $%.4f bought now"
    log.info(text, context.window_id, judgments.level, *bought)
    found: dict[str, Score | Rejection] = {
        one.trajectory_id: _given(one) for one in judgments.scores
    }
    found |= {one.trajectory_id: one for one in judgments.rejected}
    return [found[trajectory.trajectory_id] for trajectory in trajectories]


def _given(one: JudgedScore) -> Score:
    return Score(
        value=one.score,
        low=one.low,
        high=one.high,
        reasons=one.reasons,
        seen=one.seen,
        components=dict(one.opinions),
    )


async def _judge(context: ScoringContext, *, cheaper: bool) -> Judgments:
    """Judge the window by the judge alone, or with a panel, and require proof of it."""
    judge, store, window_id = context.settings.judge, context.store, context.window_id
    home = context.settings.home
    judged, truth, unreadable = await asyncio.to_thread(read_evidence, home, context.artifact)
    config = JudgeConfig(
        rubric=load_rubric(judge.rubric),
        context_tokens=judge.context_tokens,
        reasoning_tokens=judge.reasoning_tokens,
        passes=judge.passes,
        seed=context.settings.seed,
        repeats=not cheaper,
    )
    work = _Work(context=context, judged=judged, truth=truth, config=config, cheaper=cheaper)
    members = [judge] if cheaper else panel_members(judge)
    before: Mapping[str, Sequence[JudgedGroup]]
    answered: Mapping[str, Sequence[CanaryResult]]
    if len(members) == 1 and not await read_answers(store, [window_id.partition("+")[0]]):
        one = await _ask(judge, work, trusted=True)
        judgments, by = one.judgments, one.by
        trust = await asyncio.to_thread(_trust, one.before)
        before = {row.window_id: judged_groups(row) for row in one.before}
        answered = {row.window_id: canary_results(row) for row in one.before}
    else:
        panel = await together(store, window_id, await _ask_all(members, work))
        judgments, by, trust = panel.judgments, panel.by, panel.trust
        before, answered = panel.before, panel.canaries_before
        if not await evidence_before(store, by, without=window_id):
            # Its evidence begins once, with what its members have judged.
            for name, groups in before.items():
                await _store(store, name, by, groups, answered.get(name, ()))
        weights = ", ".join(f"{name} {weight:.2f}" for name, weight in panel.weights.items())
        context.metrics.update(panel=weights)
        if panel.disagreement is not None:
            context.metrics["disagreement"] = panel.disagreement
        await _store(store, window_id, by, judgments.groups, judgments.canaries)
    ever = await _most_evidence(store, by, window_id, judgments)
    history = [group for groups in before.values() for group in groups]
    canaries = [*judgments.canaries, *(one for own in answered.values() for one in own)]
    await asyncio.to_thread(_require_proof, context, trust, judgments, history, canaries, ever)
    # The judge never saw them, so they count neither for nor against it.
    judgments = replace(judgments, rejected=(*judgments.rejected, *unreadable))
    return replace(judgments, level=Level.CHEAPER) if cheaper else judgments


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The trajectories and their context, the same for every judge of a window."""

    context: ScoringContext
    judged: Sequence[JudgedTrajectory]
    truth: GroundTruth
    config: JudgeConfig
    cheaper: bool
    in_flight: InFlight = field(default_factory=InFlight)


async def _ask(judge: JudgeSettings, work: _Work, *, trusted: bool) -> MemberJudgment:
    """Ask one judge within its time. If ``trusted``, its scores are posterior means."""
    limit = asyncio.timeout(judge.timeout_s)
    try:
        async with limit:
            return await _ask_and_store(judge, work, trusted=trusted)
    except TimeoutError as error:
        if not limit.expired():  # the database did not answer in its own time
            raise
        raise ScoringError(
            f"window {work.context.window_id} was not judged within {judge.timeout_s:g} s"
            f" (JUDGE_TIMEOUT_SECONDS) by {judge.model or judge.model_path}: the judgments so far"
            " are stored, run the window again"
        ) from error


async def _ask_and_store(judge: JudgeSettings, work: _Work, *, trusted: bool) -> MemberJudgment:
    """Ask one judge, and store its opinions."""
    context = work.context
    store, window_id = context.store, context.window_id
    log_file = context.settings.home.logs / "judge.log"
    async with open_judge(judge, work.config, log_file, cheaper=work.cheaper) as (client, config):
        by = JudgeIdentity(judge=client.name, method=METHOD, rubric=config.rubric.version)
        before = await judged_before(store, by, WINDOWS, without=window_id)
        judgments = await judge_window(
            client,
            work.judged,
            work.truth,
            config,
            ledger=StoredJudgments(store, window_id),
            budget=Budget(
                window=BudgetLimits(tokens=judge.window_tokens, usd=judge.window_usd),
                day=BudgetLimits(tokens=judge.day_tokens, usd=judge.day_usd),
            ),
            trust=await asyncio.to_thread(_trust, before) if trusted else BLIND,
            retries=judge.retries,
            pace=Pace(judge.requests_per_minute, judge.tokens_per_minute),
            in_flight=work.in_flight,
        )
    await _store(store, window_id, by, judgments.groups, judgments.canaries)
    for line in summarise_canaries(judgments.canaries):
        # Of several judges, the first one's.
        context.metrics.setdefault(f"canary_{line.kind}", line.mean)
    return MemberJudgment(by=by, judgments=judgments, before=before)


async def _ask_all(members: Sequence[JudgeSettings], work: _Work) -> list[MemberJudgment]:
    """Ask all judges of a panel. A judge that fails is left out, unless all fail."""
    asked = [_ask(member, work, trusted=False) for member in members]
    results = await asyncio.gather(*asked, return_exceptions=True)
    done, failed = [], []
    for result in results:
        if isinstance(result, MemberJudgment):
            done.append(result)
        elif isinstance(result, ScoringError | ServingError | BudgetSpentError):
            log.warning(
                "window %s: a judge of the panel failed: %s", work.context.window_id, result
            )
            failed.append(result)
        else:
            raise result
    if not done:
        raise failed[0]
    work.context.metrics["panel_failed"] = len(failed)
    return done


def _trust(before: Sequence[WindowValidity]) -> Trust:
    groups = [group for row in before for group in judged_groups(row)]
    canaries = [answer for row in before for answer in canary_results(row)]
    return learn(groups, canaries)


async def _store(
    store: Store,
    window_id: str,
    by: JudgeIdentity,
    groups: Sequence[JudgedGroup],
    canaries: Sequence[CanaryResult],
) -> None:
    found = await asyncio.to_thread(log_evidence, groups)
    row = WindowValidity(window_id=window_id, by=by, groups=groups, canaries=canaries, log_e=found)
    await store_validity(store, row)


async def _most_evidence(
    store: Store, by: JudgeIdentity, window_id: str, judgments: Judgments
) -> tuple[float, float]:
    """Return the largest evidence that the judge ever had, this window included.

    The first is by outcomes, the second by answers to canaries.
    """
    rows = await evidence_before(store, by, without=window_id)

    def most() -> tuple[float, float]:
        outcomes = [row.log_e or log_evidence(judged_groups(row)) for row in rows]
        planted = [log_canaries(canary_results(row)) for row in rows]
        return (
            most_evidence([*outcomes, log_evidence(judgments.groups)]),
            most_evidence([*planted, log_canaries(judgments.canaries)]),
        )

    return await asyncio.to_thread(most)


def _require_proof(
    context: ScoringContext,
    trust: Trust,
    judgments: Judgments,
    before: Sequence[JudgedGroup],
    canaries: Sequence[CanaryResult],
    ever: tuple[float, float],
) -> None:
    """Report how far the judge agrees with outcomes.

    ``before`` are the groups of the last windows, ``canaries`` the answers of these and this one.
    ``ever`` is the largest evidence after any window of its life, by outcomes and by canaries.

    Raises:
        UnprovenJudgeError: its agreement may be chance.
    """
    needed = context.settings.judge.evidence
    recent = [*judgments.groups, *before]
    by_outcomes, by_canaries = ever
    shown = min(evidence(recent, canaries), by_outcomes if has_outcomes(recent) else by_canaries)
    context.metrics.update(evidence=shown, validity=trust.validity)
    for name, groups in (("window", judgments.groups), ("recent", recent)):
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

    A local judge is shown what its checkpoint can read. Its engine writes to ``log_file``.
    """
    model, base_url, name = judge.model, judge.base_url, None
    price = Price(prompt_usd=judge.prompt_usd, completion_usd=judge.completion_usd)
    temperature, timeout_s = judge.temperature, judge.request_timeout_s
    api_key = judge.api_key.get_secret_value() if judge.api_key else "none"
    async with AsyncExitStack() as stack:
        if cheaper:
            model = judge.cheaper_model
            price = Price(
                prompt_usd=judge.cheaper_prompt_usd, completion_usd=judge.cheaper_completion_usd
            )
        elif judge.model_path is not None:
            local = await stack.enter_async_context(local_judge(judge.model_path, log_file))
            model, base_url, name, price = MODEL, local.base_url, local.name, Price()
            api_key = local.api_key
            temperature = TEMPERATURE if temperature is None else temperature
            timeout_s = judge.timeout_s  # a local engine may be slow
            config = fitting(config, judge.model_path, local.context_tokens)
        client = JudgeClient(
            model=model or "",
            base_url=base_url,
            api_key=api_key,
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
    groups: dict[str, list[float]] = {}
    for trajectory, score in zip(trajectories, scores, strict=True):
        groups.setdefault(trajectory.scenario_id, []).append(score.value)
    equal = all(pstdev(values) < MIN_GROUP_STD for values in groups.values())  # as the trainer
    if equal or not context.settings.judge.heuristic_fallback:
        raise spent
    await _report(context, Level.HEURISTIC, model="heuristic", reliability=0.0)
    return [replace(score, reasons=(f"{FALLBACK}{spent}",)) for score in scores]


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
