"""Judging a window by several judges: models, checkpoints, and people who answered pairs.

Each judge asks and stores by itself, as if it were alone, under the common budget. A judge that
fails is left out of this window. ``babylon.scoring.judge.panel`` combines the opinions.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from babylon.scoring.judge.calibrate import Estimate
from babylon.scoring.judge.canary_results import CanaryResult, Kind
from babylon.scoring.judge.judgment import JudgedScore, Judgments, Level
from babylon.scoring.judge.panel import (
    Combined,
    PanelGroup,
    PanelJudgment,
    judge_together,
    side_by_side,
)
from babylon.scoring.judge.people import PEOPLE, people_groups
from babylon.scoring.judge.reported_validity import canary_results, judged_groups
from babylon.scoring.judge.validity import JudgedGroup, Trust, believe, learn
from babylon.store import Store
from babylon.store.judge_validity import JudgeIdentity, WindowValidity
from babylon.store.people import read_answers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberJudgment:
    """One judge's opinions of a window, and of its last windows, newest first."""

    by: JudgeIdentity
    judgments: Judgments
    before: Sequence[WindowValidity]


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelResult:
    """The panel's judgments, and its opinions of windows before: window id → groups, oldest first.

    ``canaries_before`` are its answers to canaries of these windows.
    """

    by: JudgeIdentity
    judgments: Judgments
    trust: Trust
    before: Mapping[str, Sequence[JudgedGroup]]
    canaries_before: Mapping[str, Sequence[CanaryResult]]
    weights: Mapping[str, float]
    disagreement: float | None


async def together(store: Store, window_id: str, members: Sequence[MemberJudgment]) -> PanelResult:
    """Combine what the members and people said of a window."""
    window = {one.by.judge: list(one.judgments.groups) for one in members}
    earlier: dict[str, dict[str, list[JudgedGroup]]] = {}
    for one in members:
        for row in one.before:
            known = [group for group in judged_groups(row) if group.trajectory_ids]
            earlier.setdefault(row.window_id, {})[one.by.judge] = known
    own_id = window_id.partition("+")[0]
    answers = await read_answers(store, [own_id, *earlier])
    # People who saw outcomes must not prove a window that only the others judged.
    if any(answer.window_id == own_id for answer in answers):
        for name, own in [(own_id, window), *earlier.items()]:
            if told := [answer for answer in answers if answer.window_id == name]:
                own[PEOPLE] = people_groups(told, _outcomes(own.values()))
    judges = [one.by.judge for one in members]
    if PEOPLE in window:
        judges.append(PEOPLE)
    # judges of a window saw the same canaries
    planted: dict[str, list[Sequence[CanaryResult]]] = {}
    for row in (row for one in members for row in one.before):
        planted.setdefault(row.window_id, []).append(canary_results(row))
    before = [side_by_side(earlier[name]) for name in sorted(earlier)]
    groups = side_by_side(window)
    found = await asyncio.to_thread(judge_together, judges, before, groups)
    history = [group for one in found.before for group in one]
    canaries = {name: _answers(own) for name, own in planted.items()}
    trust = await asyncio.to_thread(
        learn, history, [one for own in canaries.values() for one in own]
    )
    first = members[0]
    disagreements = [g.disagreement for g in found.groups if g.disagreement is not None]
    return PanelResult(
        by=replace(first.by, judge=f"panel: {' + '.join(judges)}"),
        judgments=_judgments(members, groups, found, trust),
        trust=trust,
        before=dict(zip(sorted(earlier), found.before, strict=True)),
        canaries_before=canaries,
        weights=found.weights,
        disagreement=fmean(disagreements) if disagreements else None,
    )


def _answers(judges: Iterable[Sequence[CanaryResult]]) -> list[CanaryResult]:
    """Return the mean answer of several judges to each kind of canary of one window.

    The judges saw the same canaries, so their answers count as one.
    """
    values: dict[Kind, list[float]] = {}
    for answer in (answer for own in judges for answer in own):
        values.setdefault(answer.kind, []).append(answer.value)
    return [CanaryResult(kind=kind, value=fmean(given)) for kind, given in values.items()]


def _outcomes(judges: Iterable[Sequence[JudgedGroup]]) -> dict[str, float]:
    outcomes: dict[str, float] = {}
    for groups in judges:
        for group in groups:
            outcomes |= zip(group.trajectory_ids, group.outcomes, strict=False)
    return outcomes


def _judgments(
    members: Sequence[MemberJudgment],
    groups: Sequence[PanelGroup],
    found: PanelJudgment,
    trust: Trust,
) -> Judgments:
    own = {
        one.by.judge: {score.trajectory_id: score for score in one.judgments.scores}
        for one in members
    }
    scores = [
        score
        for group, combined in zip(groups, found.groups, strict=True)
        for score in _scores(group, combined, trust, own)
    ]
    judged = {score.trajectory_id for score in scores}
    lost = {r.trajectory_id: r for one in members for r in one.judgments.rejected}
    every = [one.judgments for one in members]
    return Judgments(
        scores=tuple(scores),
        rejected=tuple(loss for name, loss in lost.items() if name not in judged),
        groups=tuple(combined.group for combined in found.groups),
        canaries=tuple(_answers(one.canaries for one in every)),
        level=max((one.level for one in every), key=list(Level).index),
        reliability=fmean(one.reliability for one in every),
        requests=sum(one.requests for one in every),
        tokens=sum(one.tokens for one in every),
        usd=sum(one.usd for one in every),
    )


def _scores(
    group: PanelGroup,
    combined: Combined,
    trust: Trust,
    own: Mapping[str, Mapping[str, JudgedScore]],
) -> list[JudgedScore]:
    """Return the scores of a group, with each judge's opinion and reasons."""
    opinion = combined.group
    estimate = Estimate(
        scores=np.array(opinion.opinions), errors=np.array(opinion.errors), reliability=1.0
    )
    values, halves = believe(estimate, trust, range(len(opinion.opinions)))
    scores = []
    for at, name in enumerate(opinion.trajectory_ids):
        said = {judge: given[name] for judge, given in own.items() if name in given}
        if not said:  # only people judged it
            continue
        parts = {judge: given[name][0] for judge, given in group.opinions.items() if name in given}
        reasons = tuple(f"{judge}: {why}" for judge, one in said.items() for why in one.reasons)
        scores.append(
            JudgedScore(
                trajectory_id=name,
                score=float(values[at]),
                low=max(float(values[at] - halves[at]), 0.0),
                high=min(float(values[at] + halves[at]), 1.0),
                reasons=reasons,
                seen=next(iter(said.values())).seen,
                opinions=parts,
            )
        )
    return scores
