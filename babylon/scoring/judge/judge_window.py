"""Judging a window: one pass over each group, repetition of unstable trajectories, calibration.

A trajectory that the judge cannot judge is rejected with its reason, and the others are judged
without it. If most are rejected, the judge is at fault, and judging fails. Prompts, fits and scores
are computed in threads, because the event loop also renews the window's lease.

A seed determines which trajectories are judged together and in which order, so that a repeated run
asks the same prompts. In the first pass the blocks form a ring. Each block shares one trajectory
with the next; this anchor puts both on one scale, and closing the ring shows how well that works.
The first block is asked again in reversed order, because only a repetition shows how reliable the
judge is. Later passes ask unstable items in new blocks, and list those early that were listed late
before. A judge that reads single trajectories (``list_size`` 1) has neither blocks nor anchors.

The first repetition of some groups holds a canary (``babylon.scoring.judge.canaries``). A canary
counts as an appearance, so it costs no more than a repetition.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from random import Random
from statistics import fmean, pstdev

from babylon.core.errors import ScoringError
from babylon.core.types import Rejection
from babylon.quality.decode import MAX_DETAIL
from babylon.scoring.judge.budget import Budget, BudgetSpentError, InFlight, JudgeLedger
from babylon.scoring.judge.cached_judge import (
    RETRIES,
    BlockVerdict,
    CachedJudge,
    LostItem,
    await_all,
)
from babylon.scoring.judge.calibrate import (
    Estimate,
    ScoreObservation,
    calibrate,
    unstable,
)
from babylon.scoring.judge.canaries import chosen_groups
from babylon.scoring.judge.canary_results import (
    COPIES,
    PLANTED,
    CanaryResult,
    Kind,
    compared,
    swapped,
)
from babylon.scoring.judge.group_prompts import Block, GroupPrompts, prepare_readable
from babylon.scoring.judge.judge_client import JudgeClient
from babylon.scoring.judge.judgment import (
    GroundTruth,
    JudgeConfig,
    JudgedScore,
    JudgedTrajectory,
    Judgments,
    Level,
)
from babylon.scoring.judge.pace import Pace
from babylon.scoring.judge.validity import JudgedGroup, Trust, believe

BLIND = Trust(validity=1.0)


async def judge_window(
    client: JudgeClient,
    judged: Sequence[JudgedTrajectory],
    truth: GroundTruth,
    config: JudgeConfig,
    *,
    ledger: JudgeLedger,
    budget: Budget | None = None,
    trust: Trust = BLIND,
    retries: int = RETRIES,
    pace: Pace | None = None,
    in_flight: InFlight | None = None,
) -> Judgments:
    """Judge each group (scenario) of a window by itself.

    ``trust`` turns the judge's opinions into scores. By default, opinions are the scores. Judges of
    one panel share ``in_flight``.

    Raises:
        ScoringError: there is no trajectory, or the judge fails, or judges no more than half of
            them. Bought judgments are stored.
        BudgetSpentError: one pass over the window does not fit into the budget.
    """
    if not judged:
        raise ScoringError(
            f"judge {client.name} has nothing to judge: no trajectory of the window can be read;"
            " correct how its rows are recorded, or choose another scorer"
        )
    judge = CachedJudge(
        client, ledger, budget or Budget(), retries=retries, pace=pace, in_flight=in_flight
    )
    judgings, rejected = await asyncio.to_thread(_prepare, judged, truth, config)
    # Before anything is bought: half a pass would leave agents without a score.
    blocks = [group.first_pass() for group in judgings]
    await judge.require([(one.prompts, own) for one, own in zip(judgings, blocks, strict=True)])
    budget_ran_out = False
    try:
        first = zip(judgings, blocks, strict=True)
        await await_all([group.judge_blocks(judge, own) for group, own in first])
        if config.repeats:
            budget_ran_out = any(await await_all([group.repeat(judge) for group in judgings]))
        rejected += [loss for group in judgings for loss in group.rejected()]
        _require_majority(client.name, len(judged), rejected)
    except ScoringError:
        await judge.forget_problems()
        raise
    known = [group for group in judgings if group.known]
    found = await asyncio.to_thread(lambda: [s for group in known for s in group.scores(trust)])
    scores = {score.trajectory_id: score for score in found}
    ids = [one.trajectory.trajectory_id for one in judged]
    outcomes = {one.trajectory.trajectory_id: one.trajectory.pnl_usd for one in judged}
    return Judgments(
        scores=tuple(scores[name] for name in ids if name in scores),
        rejected=tuple(rejected),
        groups=tuple(group.beside(outcomes) for group in known),
        canaries=tuple(answer for group in known for answer in group.answers),
        level=Level.ONE_PASS if budget_ran_out or not config.repeats else Level.FULL,
        reliability=fmean(group.estimate().reliability for group in known),
        requests=judge.bought.requests,
        tokens=judge.bought.tokens,
        usd=judge.bought.usd,
    )


def _prepare(
    judged: Sequence[JudgedTrajectory], truth: GroundTruth, config: JudgeConfig
) -> tuple[list["GroupJudging"], list[Rejection]]:
    groups: dict[str, list[JudgedTrajectory]] = defaultdict(list)
    for one in judged:
        groups[one.trajectory.scenario_id].append(one)
    judgings, rejected = [], []
    for group in groups.values():
        prompts, unreadable = prepare_readable(group, truth, config)
        rejected += unreadable
        if prompts is not None:
            judgings.append(GroupJudging(prompts))
    if judgings and config.repeats:
        _choose_canaries(judgings)
    return judgings, rejected


def _choose_canaries(judgings: Sequence["GroupJudging"]) -> None:
    prompts = judgings[0].prompts
    seed = f"{prompts.config.seed}:{prompts.window_id}"
    for number in chosen_groups([group.items for group in judgings], seed):
        judgings[number].canary = Random(f"{seed}:canary:{number}").choice(PLANTED)


def _require_majority(judge: str, count: int, rejected: Sequence[Rejection]) -> None:
    """Raise if the judge, rather than what a few trajectories hold, must be at fault."""
    if 2 * len(rejected) > count:
        reasons = Counter(str(loss.reason) for loss in rejected).most_common()
        raise ScoringError(
            f"judge {judge} gave no usable judgment of {len(rejected)} of {count} trajectories"
            f" ({', '.join(f'{number} {reason}' for reason, number in reasons)}), the first"
            f" {rejected[0].trajectory_id}: {rejected[0].detail}; earlier judgments are stored: run"
            " the window again, or use another JUDGE_MODEL"
        )


@dataclass(slots=True)
class GroupJudging:
    """The judging of one group, with the verdicts so far and the items that cannot be judged."""

    prompts: GroupPrompts
    canary: Kind | None = None
    verdicts: list[BlockVerdict] = field(default_factory=list)
    answers: list[CanaryResult] = field(default_factory=list)
    lost: dict[int, LostItem] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)  # not asked again
    _wasted: int = 0  # appearances in prompts without a usable reply, and of canaries alone
    _fitted: tuple[int, Estimate] | None = None

    @property
    def items(self) -> int:
        return len(self.prompts.shown)

    @property
    def known(self) -> list[int]:
        """The items that are not lost."""
        return [item for item in range(self.items) if item not in self.lost]

    @property
    def in_lists(self) -> bool:
        return self.prompts.config.list_size > 1

    def first_pass(self) -> list[Block]:
        """Return the blocks that show every trajectory at least once."""
        return ring_blocks(self.items, self.prompts.block_size, self._random("first"))

    async def judge_blocks(
        self, judge: CachedJudge, blocks: Sequence[Block], *, repeat: int = 0
    ) -> None:
        found = await judge.judge(self.prompts, blocks, repeat=repeat)
        self.verdicts += found.given
        self.failed |= found.lost.keys()
        self._wasted += found.wasted
        # Who was judged once is not lost by a later failure.
        judged = {item for verdict in self.verdicts for item in verdict.block}
        lost = self.lost | found.lost
        self.lost = {item: loss for item, loss in lost.items() if item not in judged}

    async def repeat(self, judge: CachedJudge) -> bool:
        """Judge unstable trajectories again until none is left, or passes or budget run out.

        Return True if the budget ran out.
        """
        number = 0
        while blocks := await asyncio.to_thread(self._next, number):
            number += 1
            if not await judge.fits(self.prompts, blocks, repeat=number):
                return True
            try:
                if number == 1 and await self._ask_canary(judge, blocks[0]):
                    blocks = blocks[1:]
                await self.judge_blocks(judge, blocks, repeat=number)
            except BudgetSpentError:  # repairs can exceed the estimate; one pass is complete
                return True
        return False

    async def _ask_canary(self, judge: CachedJudge, block: Block) -> bool:
        """Ask about the canary, and return True if that was a reading of the block.

        In a list the canary replaces a trajectory, and the others are read as they would have been.
        """
        kind = self.canary
        if kind is None or len(self.known) < 2 or (self.in_lists and len(block) < 2):
            return False
        item, guest = self._random("canary").choice(block), self.items
        asked = tuple(guest if one == item else one for one in block)
        if not self.in_lists:
            asked = (guest,)
        verdict = await judge.read(self.prompts.planted(kind, item), asked, repeat=1)
        if verdict is None:  # the trajectories are asked about without it
            self._wasted += len(asked)
            return False
        self.answers += self._answers_of(kind, verdict, item)
        if self.in_lists:
            self.verdicts.append(verdict)
        else:
            self._wasted += len(asked)
        return self.in_lists

    def _answers_of(self, kind: Kind, verdict: BlockVerdict, item: int) -> list[CanaryResult]:
        """Return the answers that a reading with a canary in the place of ``item`` gives."""
        scores = dict(zip(verdict.block, verdict.scores, strict=True))
        planted = scores.pop(self.items)
        plain = [dict(zip(v.block, v.scores, strict=True)) for v in self.verdicts]
        same = [one for one in plain if scores.keys() | {item} <= one.keys()]
        found: list[CanaryResult | None] = []
        if self.in_lists:  # the first reading was in the other order
            found += [swapped(one, scores) for one in same[:1]]
        if kind not in COPIES:
            means = _readings(self.verdicts, self.items)
            beside = list(scores.values()) or [means[i] for i in means if i != item]
            found += [compared(kind, planted, beside)]
        elif same:  # both relative to the same trajectories, if the request showed any
            before = {name: fmean(one[name] for one in same) for name in (item, *scores)}
            shifts = [score - before[name] for name, score in scores.items()] or [0.0]
            found += [CanaryResult(kind=kind, value=planted - before[item] - fmean(shifts))]
        return [one for one in found if one is not None]

    def rejected(self) -> list[Rejection]:
        """Return the items that cannot be judged, with the reason."""
        return [
            Rejection(
                trajectory_id=self.prompts.shown[item].trajectory_id,
                reason=loss.reason,
                detail=loss.detail[:MAX_DETAIL],
            )
            for item, loss in sorted(self.lost.items())
        ]

    def estimate(self) -> Estimate:
        """Return the estimate from all verdicts so far, computed once for them."""
        if self._fitted is None or self._fitted[0] != len(self.verdicts):
            estimate = _from_scores(self.verdicts, self.items, together=self.in_lists)
            self._fitted = (len(self.verdicts), estimate)
        return self._fitted[1]

    def scores(self, trust: Trust) -> list[JudgedScore]:
        """Return the group's scores, with intervals and reasons."""
        estimate = self.estimate()
        scores, halves = believe(estimate, trust, self.known)
        reasons: dict[int, dict[str, None]] = defaultdict(dict)
        for verdict in self.verdicts:
            for item, explanation in zip(verdict.block, verdict.explanations, strict=True):
                reasons[item][explanation] = None  # a canary's are looked up by nobody
        return [
            JudgedScore(
                trajectory_id=self.prompts.shown[item].trajectory_id,
                score=float(scores[item]),
                low=max(float(scores[item] - halves[item]), 0.0),
                high=min(float(scores[item] + halves[item]), 1.0),
                reasons=tuple(reason for reason in reasons[item] if reason),
                seen=self.prompts.seen(item),
            )
            for item in self.known
        ]

    def beside(self, outcomes: Mapping[str, float]) -> JudgedGroup:
        """Return the judge's opinions beside the outcomes (trajectory id → US dollars)."""
        estimate, known = self.estimate(), self.known
        ids = tuple(self.prompts.shown[item].trajectory_id for item in known)
        return JudgedGroup(
            opinions=tuple(float(estimate.scores[item]) for item in known),
            errors=tuple(float(estimate.errors[item]) for item in known),
            outcomes=tuple(outcomes[name] for name in ids),
            trajectory_ids=ids,
            spread_usd=pstdev(outcomes[one.trajectory_id] for one in self.prompts.shown),
        )

    def _next(self, number: int) -> list[Block]:
        """Return the next blocks, none if all trajectories are stable or the passes are used up."""
        known = [item for item in self.known if item not in self.failed]
        shown = sum(len(verdict.block) for verdict in self.verdicts) + self._wasted
        room = int(self._max_appearances) - shown
        size = self.prompts.block_size
        if len(known) < 2 or room < 1:
            return []
        # One pass shows no contradictions, so the first repetition measures the judge's noise.
        if number == 0:
            return self._probe()
        estimate = self.estimate()
        doubtful, width = unstable(estimate, known), estimate.high - estimate.low
        widest = sorted(doubtful, key=lambda item: -width[item])[:room]
        if size == 1:
            return [(item,) for item in widest]
        if len(known) <= size and doubtful:
            widest = known  # one list of the whole group tells more than a part
        if len(widest) < 2:
            return []
        return mixed_blocks(widest, size, self._places(), self._random(number))

    def _probe(self) -> list[Block]:
        """Return the first block in reversed order; if blocks are single items, the first six."""
        few = self.first_pass()[: max(1, 6 // self.prompts.block_size)]
        kept = [tuple(item for item in block[::-1] if item not in self.failed) for block in few]
        return [block for block in kept if block]

    @property
    def _max_appearances(self) -> float:
        """Maximum number of appearances, in refused prompts too, because they cost tokens.

        Prompts about one trajectory repeat rubric and ground truth more often: half as many.
        """
        config = self.prompts.config
        return (config.passes if self.in_lists else config.passes / 2) * self.items

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


def _from_scores(verdicts: Sequence[BlockVerdict], items: int, *, together: bool) -> Estimate:
    return calibrate(
        [
            ScoreObservation(
                request=request, item=item, place=_place(at, len(v.block)), score=score
            )
            for request, v in enumerate(verdicts)
            for at, (item, score) in enumerate(zip(v.block, v.scores, strict=True))
            if item < items  # not a canary
        ],
        items,
        # In a single list the data cannot tell a place's bias from a worth.
        together=together and len(verdicts) > 1,
    )


def _readings(verdicts: Sequence[BlockVerdict], items: int) -> dict[int, float]:
    """Return item → mean score, each score less the mean of its reply. Canaries are left out."""
    given: dict[int, list[float]] = defaultdict(list)
    for verdict in verdicts:
        scores = {i: s for i, s in zip(verdict.block, verdict.scores, strict=True) if i < items}
        mean = fmean(scores.values()) if len(scores) > 1 else 0.0
        for item, score in scores.items():
            given[item].append(score - mean)
    return {item: fmean(scores) for item, scores in given.items()}


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
