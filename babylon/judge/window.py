"""A window's trajectories → one score each: first pass, repetition where unstable, one scale."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean

from babylon.judge.bradley_terry import fit_preferences
from babylon.judge.budget import Budget, BudgetSpentError
from babylon.judge.cache import JudgmentCache
from babylon.judge.calibrate import Estimate, Observation, calibrate, tie, unstable
from babylon.judge.client import JudgeClient
from babylon.judge.design import again, ring, uncompared
from babylon.judge.panel import Panel, Verdict, together
from babylon.judge.records import (
    GroundTruth,
    JudgeConfig,
    JudgedScore,
    JudgedTrajectory,
    Judgments,
    Level,
    Method,
)
from babylon.judge.sheet import Block, Sheet, prepare
from babylon.store.judgments import Spent

_PAIRS_A_PASS = 6  # a pair tells one bit where a list of six tells ten


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
    panel = Panel(client, cache, budget)
    groups: dict[str, list[JudgedTrajectory]] = defaultdict(list)
    for one in judged:
        groups[one.trajectory.scenario_id].append(one)
    sittings = [Sitting(prepare(group, truth, config)) for group in groups.values()]
    await _require_one_pass(panel, budget, sittings)
    await together([sitting.take(panel, sitting.first_pass()) for sitting in sittings])
    cut_short = False
    if config.repeats:
        cut_short = any(await together([sitting.repeat(panel, budget) for sitting in sittings]))
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


async def _require_one_pass(panel: Panel, budget: Budget, sittings: Sequence["Sitting"]) -> None:
    costs = [await panel.cost(sitting.sheet, sitting.first_pass()) for sitting in sittings]
    total = Spent(tokens=sum(c.tokens for c in costs), usd=sum(c.usd for c in costs))
    with budget.reserve(total) as reservation:
        reservation.cost = Spent()


@dataclass(slots=True)
class Sitting:
    """One group before the judge: what was said of it so far."""

    sheet: Sheet
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def items(self) -> int:
        return len(self.sheet.shown)

    def first_pass(self) -> list[Block]:
        return ring(self.items, self.sheet.block_size, self._random("first"))

    async def take(self, panel: Panel, blocks: Sequence[Block], *, repeat: int = 0) -> None:
        self.verdicts += await panel.judge(self.sheet, blocks, repeat=repeat)

    async def repeat(self, panel: Panel, budget: Budget) -> bool:
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
        return _ESTIMATORS[self.sheet.config.method](self.verdicts, self.items)

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
        if self.items < 2:
            return []
        if number == 0:
            return self._probe() if self.sheet.config.passes > 1 else []
        room = int(self._most) - sum(len(verdict.block) for verdict in self.verdicts)
        estimate = self.estimate()
        if self.sheet.config.method == "preference":
            return self._neighbours(estimate)[: max(room, 0) // 2]
        width = estimate.high - estimate.low
        doubtful = sorted(unstable(estimate), key=lambda item: -width[item])[: max(room, 0)]
        if self.sheet.config.method == "regression":
            return [(item,) for item in doubtful]
        if len(doubtful) < 2:
            return []
        return again(doubtful, self.sheet.block_size, self._places(), self._random(number))

    def _probe(self) -> list[Block]:
        """The first block again, reversed; of single ones and pairs as many as a block has."""
        first = self.first_pass()
        few = first[: max(1, 6 // self.sheet.block_size)]
        return [block[::-1] for block in few]

    def _neighbours(self, estimate: Estimate) -> list[Block]:
        """First neighbours that were never compared, then those too close, the other way round."""
        compared = {(v.block[0], v.block[1]) for v in self.verdicts}
        order = sorted(range(self.items), key=lambda item: -estimate.scores[item])
        never = [
            pair
            for pair in uncompared(order, compared, set(range(self.items)))
            if pair[::-1] not in compared
        ]
        return never or uncompared(order, compared, set(unstable(estimate)))

    @property
    def _most(self) -> float:
        passes = self.sheet.config.passes
        pairs = self.sheet.config.method == "preference"
        return passes * (_PAIRS_A_PASS if pairs else 1) * self.items

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


def _from_scores(verdicts: Sequence[Verdict], items: int, *, together: bool = True) -> Estimate:
    return calibrate(
        [
            Observation(request=request, item=item, place=_place(at, len(v.block)), score=score)
            for request, v in enumerate(verdicts)
            for at, (item, score) in enumerate(zip(v.block, v.scores, strict=True))
        ],
        items,
        together=together,
    )


def _alone(verdicts: Sequence[Verdict], items: int) -> Estimate:
    return _from_scores(verdicts, items, together=False)


def _from_wins(verdicts: Sequence[Verdict], items: int) -> Estimate:
    wins = []
    for verdict in verdicts:
        first, second = verdict.block
        first_won = verdict.scores[0] > verdict.scores[1]
        wins.append((first, second, True) if first_won else (second, first, False))
    return fit_preferences(wins, items)


_ESTIMATORS: dict[Method, Callable[[Sequence[Verdict], int], Estimate]] = {
    "ruler": _from_scores,
    "preference": _from_wins,
    "regression": _alone,
}
