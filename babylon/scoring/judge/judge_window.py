"""Judging a window: one pass over each group, repetition of unstable trajectories, calibration.

A seed determines which trajectories are judged together and in which order, so that a repeated run
asks the same prompts. In the first pass the blocks form a ring. Each block shares one trajectory
with the next; this anchor puts both on one scale, and closing the ring shows how well that works.
The first block is asked again in reversed order, because only a repetition shows how reliable the
judge is. Later passes ask unstable items in new blocks, and list those early that were listed late
before. Pairs are chosen by the information of their answer. With a strong bias for the first place
these pairs are not the neighbours.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import pairwise, permutations
from math import ceil, log2
from random import Random
from statistics import fmean

import numpy as np

from babylon.scoring.judge.cached_judge import (
    BlockVerdict,
    Budget,
    BudgetSpentError,
    CachedJudge,
    JudgmentCache,
    await_all,
    plus,
)
from babylon.scoring.judge.calibrate import (
    Estimate,
    Floats,
    ScoreObservation,
    Win,
    calibrate,
    fit_preferences,
    information,
    tie,
    unstable,
)
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
    """Judge each group (scenario) of a window by itself.

    Raises:
        ScoringError: the judge fails or gives no usable reply. Bought judgments are stored.
        BudgetSpentError: one pass over the window does not fit into the budget.
    """
    budget = budget or Budget()
    judge = CachedJudge(client, cache, budget)
    groups: dict[str, list[JudgedTrajectory]] = defaultdict(list)
    for one in judged:
        groups[one.trajectory.scenario_id].append(one)
    judgings = [GroupJudging(prepare_group(group, truth, config)) for group in groups.values()]
    # Before anything is bought: half a pass would leave agents without a score.
    await _require_one_pass(judge, budget, judgings)
    await await_all([group.judge_blocks(judge, group.first_pass()) for group in judgings])
    budget_ran_out = False
    if config.repeats:
        budget_ran_out = any(await await_all([group.repeat(judge, budget) for group in judgings]))
    scores = {score.trajectory_id: score for group in judgings for score in group.scores()}
    return Judgments(
        scores=tuple(scores[one.trajectory.trajectory_id] for one in judged),
        level=Level.ONE_PASS if budget_ran_out or not config.repeats else Level.FULL,
        reliability=fmean(group.estimate().reliability for group in judgings),
        requests=judge.requests,
        tokens=budget.spent.tokens,
        usd=budget.spent.usd,
    )


async def _require_one_pass(
    judge: CachedJudge, budget: Budget, judgings: Sequence["GroupJudging"]
) -> None:
    costs = [await judge.cost(group.prompts, group.first_pass()) for group in judgings]
    with budget.reserve(reduce(plus, costs, Spent())) as reservation:
        reservation.cost = Spent()


@dataclass(slots=True)
class GroupJudging:
    """The judging of one group, with the verdicts so far."""

    prompts: GroupPrompts
    verdicts: list[BlockVerdict] = field(default_factory=list)
    _fitted: tuple[int, Estimate] | None = None

    @property
    def items(self) -> int:
        return len(self.prompts.shown)

    def first_pass(self) -> list[Block]:
        """Return the blocks that show every trajectory at least once."""
        return ring_blocks(self.items, self.prompts.block_size, self._random("first"))

    async def judge_blocks(
        self, judge: CachedJudge, blocks: Sequence[Block], *, repeat: int = 0
    ) -> None:
        self.verdicts += await judge.judge(self.prompts, blocks, repeat=repeat)

    async def repeat(self, judge: CachedJudge, budget: Budget) -> bool:
        """Judge unstable trajectories again until none is left, or passes or budget run out.

        Return True if the budget ran out.
        """
        number = 0
        while blocks := self._next(number):
            number += 1
            if not budget.fits(await judge.cost(self.prompts, blocks, repeat=number)):
                return True
            try:
                await self.judge_blocks(judge, blocks, repeat=number)
            except BudgetSpentError:  # repairs can exceed the estimate; one pass is complete
                return True
        return False

    def estimate(self) -> Estimate:
        """Return the estimate from all verdicts so far, computed once for them."""
        if self._fitted is None or self._fitted[0] != len(self.verdicts):
            estimate = _ESTIMATORS[self.prompts.config.method](self.verdicts, self.items)
            self._fitted = (len(self.verdicts), estimate)
        return self._fitted[1]

    def scores(self) -> list[JudgedScore]:
        """Return the group's scores, with ties, intervals and reasons."""
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
                seen=self.prompts.seen(item),
            )
            for item, shown in enumerate(self.prompts.shown)
        ]

    def _next(self, number: int) -> list[Block]:
        """Return the next blocks, none if all trajectories are stable or the passes are used up."""
        room = int(self._max_appearances) - sum(len(verdict.block) for verdict in self.verdicts)
        size = self.prompts.block_size
        if self.items < 2 or room < 1:
            return []
        pairs = self.prompts.config.method == "preference"
        # One pass shows no contradictions, so the first repetition measures the judge's noise.
        # Pairs need none, because the ring has every item first once and second once.
        if number == 0 and not pairs:
            return self._probe()
        estimate = self.estimate()
        doubtful, width = unstable(estimate), estimate.high - estimate.low
        if pairs:
            order = [int(item) for item in np.argsort(-estimate.scores, kind="stable")]
            asked = {verdict.block for verdict in self.verdicts}
            known = information(_wins(self.verdicts), self.items)
            return informative_pairs(order, asked, set(doubtful), known)[: room // 2]
        widest = sorted(doubtful, key=lambda item: -width[item])[:room]
        if size == 1:
            return [(item,) for item in widest]
        if self.items <= size and doubtful:
            widest = list(range(self.items))  # one list of the whole group tells more than a part
        if len(widest) < 2:
            return []
        return mixed_blocks(widest, size, self._places(), self._random(number))

    def _probe(self) -> list[Block]:
        """Return the first block in reversed order; if blocks are single items, the first six."""
        few = self.first_pass()[: max(1, 6 // self.prompts.block_size)]
        return [block[::-1] for block in few]

    @property
    def _max_appearances(self) -> float:
        """Maximum number of appearances. Sorting by pairs takes log2 N of them for each item."""
        pairs = 1 + log2(self.items) if self.prompts.config.method == "preference" else 1
        return self.prompts.config.passes * pairs * self.items

    def _places(self) -> dict[int, list[float]]:
        places: dict[int, list[float]] = defaultdict(list)
        for verdict in self.verdicts:
            for at, item in enumerate(verdict.block):
                places[item].append(_place(at, len(verdict.block)))
        return places

    def _random(self, purpose: object) -> Random:
        prompts = self.prompts
        return Random(f"{prompts.config.seed}:{prompts.window_id}:{prompts.scenario_id}:{purpose}")


def _place(at: int, count: int) -> float:
    return at / (count - 1) if count > 1 else 0.5


def _from_scores(
    verdicts: Sequence[BlockVerdict], items: int, *, together: bool = True
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
        together=together,
    )


def _wins(verdicts: Sequence[BlockVerdict]) -> list[Win]:
    wins = []
    for verdict in verdicts:
        first, second = verdict.block
        first_won = verdict.scores[0] > verdict.scores[1]
        wins.append((first, second, True) if first_won else (second, first, False))
    return wins


def ring_blocks(items: int, size: int, random: Random) -> list[Block]:
    """Return blocks of at most ``size`` around a ring of all items, or one block if all fit."""
    order = random.sample(range(items), items)
    if size == 1:
        return [(item,) for item in order]
    if items <= size:
        return [tuple(order)]
    count = ceil(items / (size - 1))
    cuts = [round(block * items / count) for block in range(count + 1)]
    blocks = [[order[i % items] for i in range(start, end + 1)] for start, end in pairwise(cuts)]
    if size == 2:  # each item is first once and second once, so a bias for a place cancels
        return [tuple(block) for block in blocks]
    return [tuple(random.sample(block, len(block))) for block in blocks]


def mixed_blocks(
    items: Sequence[int], size: int, places: Mapping[int, Sequence[float]], random: Random
) -> list[Block]:
    """Return blocks of two or more items in new company. Items listed late so far come first."""
    mixed = random.sample(list(items), len(items))
    count = ceil(len(mixed) / size)
    cuts = [round(block * len(mixed) / count) for block in range(count + 1)]
    return [
        tuple(sorted(mixed[start:end], key=lambda item: -fmean(places[item])))
        for start, end in pairwise(cuts)
    ]


def informative_pairs(
    order: Sequence[int], asked: Set[Block], unstable: Set[int], information: Floats
) -> list[Block]:
    """Return new pairs, the most informative first, with each item in at most one.

    ``information[i, j]`` is that of the pair with i listed first. A pair needs an ``unstable`` item
    or neighbours in the ``order`` that were never compared.
    """
    met = {frozenset(pair) for pair in asked}
    strangers = {frozenset(pair) for pair in pairwise(order)} - met
    pairs = [
        pair
        for pair in permutations(order, 2)
        if pair not in asked and (not unstable.isdisjoint(pair) or frozenset(pair) in strangers)
    ]
    chosen: list[Block] = []
    busy: set[int] = set()
    for pair in sorted(pairs, key=lambda pair: -information[pair]):
        if not busy.intersection(pair):
            busy.update(pair)
            chosen.append(pair)
    return chosen


_ESTIMATORS: dict[Method, Callable[[Sequence[BlockVerdict], int], Estimate]] = {
    "ruler": _from_scores,
    "preference": lambda verdicts, items: fit_preferences(_wins(verdicts), items),
    "regression": partial(_from_scores, together=False),
}
