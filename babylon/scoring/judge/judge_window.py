"""A window's trajectories → one score each: first pass, repetition where unstable, one scale."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log2
from random import Random
from statistics import fmean

import numpy as np

from babylon.scoring.judge.block_design import informative_pairs, mixed_blocks, ring_blocks
from babylon.scoring.judge.bradley_terry import Win, fit_preferences, information
from babylon.scoring.judge.budget import Budget, BudgetSpentError
from babylon.scoring.judge.cached_judge import BlockVerdict, CachedJudge, JudgmentCache, await_all
from babylon.scoring.judge.calibrate import Estimate, ScoreObservation, calibrate, tie, unstable
from babylon.scoring.judge.group_prompts import Block, GroupPrompts, prepare_group
from babylon.scoring.judge.judge_client import JudgeClient
from babylon.scoring.judge.judgment import (
    GroundTruth,
    JudgeConfig,
    JudgedScore,
    JudgedTrajectory,
    Judgments,
    Level,
    Method,
)
from babylon.store.judgments import Spent


async def judge_window(
    client: JudgeClient,
    judged: Sequence[JudgedTrajectory],
    truth: GroundTruth,
    config: JudgeConfig,
    *,
    cache: JudgmentCache,
    budget: Budget | None = None,
) -> Judgments:
    """Judge a window's groups (its scenarios), each by itself.

    Raises:
        ScoringError: the judge fails, or does not judge as asked; what was bought is kept.
        BudgetSpentError: one pass over the window does not fit into the budget.
    """
    budget = budget or Budget()
    panel = CachedJudge(client, cache, budget)
    groups: dict[str, list[JudgedTrajectory]] = defaultdict(list)
    for one in judged:
        groups[one.trajectory.scenario_id].append(one)
    sittings = [GroupJudging(prepare_group(group, truth, config)) for group in groups.values()]
    await _require_one_pass(panel, budget, sittings)
    await await_all([sitting.take(panel, sitting.first_pass()) for sitting in sittings])
    cut_short = False
    if config.repeats:
        cut_short = any(await await_all([sitting.repeat(panel, budget) for sitting in sittings]))
    scores = {score.trajectory_id: score for sitting in sittings for score in sitting.scores()}
    return Judgments(
        scores=tuple(scores[one.trajectory.trajectory_id] for one in judged),
        level=Level.ONE_PASS if cut_short or not config.repeats else Level.FULL,
        reliability=fmean(sitting.estimate().reliability for sitting in sittings),
        requests=panel.requests,
        prompt_tokens=panel.prompt_tokens,
        completion_tokens=panel.completion_tokens,
        usd=panel.usd,
    )


async def _require_one_pass(
    panel: CachedJudge, budget: Budget, sittings: Sequence["Sitting"]
) -> None:
    costs = [await panel.cost(sitting.sheet, sitting.first_pass()) for sitting in sittings]
    total = Spent(tokens=sum(c.tokens for c in costs), usd=sum(c.usd for c in costs))
    with budget.reserve(total) as reservation:
        reservation.cost = Spent()


@dataclass(slots=True)
class GroupJudging:
    """One group before the judge: what was said of it so far."""

    sheet: GroupPrompts
    verdicts: list[BlockVerdict] = field(default_factory=list)
    _fitted: tuple[int, Estimate] | None = None

    @property
    def items(self) -> int:
        return len(self.sheet.shown)

    def first_pass(self) -> list[Block]:
        return ring_blocks(self.items, self.sheet.block_size, self._random("first"))

    async def take(self, panel: CachedJudge, blocks: Sequence[Block], *, repeat: int = 0) -> None:
        self.verdicts += await panel.judge(self.sheet, blocks, repeat=repeat)

    async def repeat(self, panel: CachedJudge, budget: Budget) -> bool:
        """Repeat what is unstable until nothing is, or passes or budget end.

        Returns whether it was the budget.
        """
        number = 0
        while blocks := self._next(number):
            number += 1
            if not budget.fits(await panel.cost(self.sheet, blocks, repeat=number)):
                return True
            try:
                await self.take(panel, blocks, repeat=number)
            except BudgetSpentError:  # repairs cost more than was estimated; one pass is complete
                return True
        return False

    def estimate(self) -> Estimate:
        """What all verdicts so far come to; computed once for them."""
        if self._fitted is None or self._fitted[0] != len(self.verdicts):
            estimate = _ESTIMATORS[self.sheet.config.method](self.verdicts, self.items)
            self._fitted = (len(self.verdicts), estimate)
        return self._fitted[1]

    def scores(self) -> list[JudgedScore]:
        estimate = self.estimate()
        tied = tie(estimate)
        reasons: dict[int, dict[str, None]] = defaultdict(dict)
        for verdict in self.verdicts:
            for item, explanation in zip(verdict.block, verdict.explanations, strict=True):
                reasons[item][explanation] = None
        return [
            JudgedScore(
                trajectory_id=shown.trajectory_id,
                score=float(tied[item]),
                low=float(estimate.low[item]),
                high=float(estimate.high[item]),
                reasons=tuple(reason for reason in reasons[item] if reason),
                seen=self.sheet.seen(item),
            )
            for item, shown in enumerate(self.sheet.shown)
        ]

    def _next(self, number: int) -> list[Block]:
        """The blocks to ask now; none when all is stable or the passes are used up."""
        room = int(self._most) - sum(len(verdict.block) for verdict in self.verdicts)
        size = self.sheet.block_size
        if self.items < 2 or room < 1:
            return []
        pairs = self.sheet.config.method == "preference"
        if number == 0 and not pairs:
            return self._probe()
        estimate = self.estimate()
        doubtful, width = unstable(estimate), estimate.high - estimate.low
        if pairs:
            order = [int(item) for item in np.argsort(-estimate.scores, kind="stable")]
            asked = {verdict.block for verdict in self.verdicts}
            tells = information(_wins(self.verdicts), self.items)
            return informative_pairs(order, asked, set(doubtful), tells)[: room // 2]
        widest = sorted(doubtful, key=lambda item: -width[item])[:room]
        if size == 1:
            return [(item,) for item in widest]
        if self.items <= size and doubtful:  # one list holds everybody, and parts of it tell less
            widest = list(range(self.items))
        if len(widest) < 2:
            return []
        return mixed_blocks(widest, size, self._places(), self._random(number))

    def _probe(self) -> list[Block]:
        """The first block mixed_blocks, reversed; of single ones as many as a block has."""
        few = self.first_pass()[: max(1, 6 // self.sheet.block_size)]
        return [block[::-1] for block in few]

    @property
    def _most(self) -> float:
        """Appearances. A pair tells one bit: to sort takes log2 N of them for each trajectory."""
        pairs = 1 + log2(self.items) if self.sheet.config.method == "preference" else 1
        return self.sheet.config.passes * pairs * self.items

    def _places(self) -> dict[int, list[float]]:
        places: dict[int, list[float]] = defaultdict(list)
        for verdict in self.verdicts:
            for at, item in enumerate(verdict.block):
                places[item].append(_place(at, len(verdict.block)))
        return places

    def _random(self, purpose: object) -> Random:
        sheet = self.sheet
        return Random(f"{sheet.config.seed}:{sheet.window_id}:{sheet.scenario_id}:{purpose}")


def _place(at: int, count: int) -> float:
    return at / (count - 1) if count > 1 else 0.5


def _from_scores(
    verdicts: Sequence[BlockVerdict], items: int, *, await_all: bool = True
) -> Estimate:
    return calibrate(
        [
            ScoreObservation(
                request=request, item=item, place=_place(at, len(v.block)), score=score
            )
            for request, v in enumerate(verdicts)
            for at, (item, score) in enumerate(zip(v.block, v.scores, strict=True))
        ],
        items,
        together=await_all,
    )


def _alone(verdicts: Sequence[BlockVerdict], items: int) -> Estimate:
    return _from_scores(verdicts, items, together=False)


def _from_wins(verdicts: Sequence[BlockVerdict], items: int) -> Estimate:
    return fit_preferences(_wins(verdicts), items)


def _wins(verdicts: Sequence[BlockVerdict]) -> list[Win]:
    wins = []
    for verdict in verdicts:
        first, second = verdict.block
        first_won = verdict.scores[0] > verdict.scores[1]
        wins.append((first, second, True) if first_won else (second, first, False))
    return wins


_ESTIMATORS: dict[Method, Callable[[Sequence[BlockVerdict], int], Estimate]] = {
    "ruler": _from_scores,
    "preference": _from_wins,
    "regression": _alone,
}
