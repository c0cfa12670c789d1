"""Each judge's agreement with outcomes, by window and over its last windows."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from babylon.scoring.judge.canary_results import CanaryLine, CanaryResult, summarise_canaries
from babylon.scoring.judge.people import PersonLine, people_lines
from babylon.scoring.judge.validity import (
    WINDOWS,
    Agreement,
    JudgedGroup,
    agreement,
    evidence,
    learn,
)
from babylon.store import Store
from babylon.store.judge_validity import (
    JudgeIdentity,
    WindowValidity,
    judged_before,
    known_judges,
)
from babylon.store.people import read_answers


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidityLine:
    """Agreement, evidence and answers to canaries of one window or of several, under a name."""

    name: str
    agreement: Agreement | None
    evidence: float
    canaries: tuple[CanaryResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A judge's agreement with the outcomes of the later windows. ``judged``: its trajectories."""

    name: str
    agreement: Agreement | None
    judged: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedJudge:
    """A judge after its training.

    ``rewards`` are means on earlier windows: after SFT, then after each round.
    """

    checkpoint: str
    earlier: tuple[str, ...]
    later: tuple[str, ...]
    first_loss: float
    last_loss: float
    rewards: tuple[float, ...]
    contenders: tuple[Contender, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReport:
    """A judge's last windows, newest first, their sum, and the validity for the next window.

    ``canaries`` are its answers to planted plays, over these windows.
    """

    by: JudgeIdentity
    windows: tuple[ValidityLine, ...]
    recent: ValidityLine
    validity: float
    canaries: tuple[CanaryLine, ...] = ()


async def read_validity(store: Store) -> list[JudgeReport]:
    """Return a report of each judge that judged any window, the latest first."""
    return [
        _report(by, await judged_before(store, by, WINDOWS)) for by in await known_judges(store)
    ]


def judged_groups(row: WindowValidity) -> list[JudgedGroup]:
    """Return the groups of a stored window."""
    return msgspec.convert(list(row.groups), list[JudgedGroup], strict=False)


def canary_results(row: WindowValidity) -> list[CanaryResult]:
    """Return the answers to canaries in a stored window."""
    return msgspec.convert(list(row.canaries), list[CanaryResult])


async def read_people(store: Store) -> list[PersonLine]:
    """Return how often the answers of each person agree with outcomes."""
    outcomes: dict[str, float] = {}
    for by in await known_judges(store):
        for row in await judged_before(store, by, WINDOWS):
            for group in judged_groups(row):
                outcomes |= zip(group.trajectory_ids, group.outcomes, strict=False)
    return people_lines(await read_answers(store), outcomes)


def _report(by: JudgeIdentity, rows: Sequence[WindowValidity]) -> JudgeReport:
    every = [group for row in rows for group in judged_groups(row)]
    canaries = [answer for row in rows for answer in canary_results(row)]
    return JudgeReport(
        by=by,
        windows=tuple(
            _line(row.window_id, judged_groups(row), canary_results(row)) for row in rows
        ),
        recent=_line("all", every, canaries),
        validity=learn(every, canaries).validity,
        canaries=tuple(summarise_canaries(canaries)),
    )


def _line(
    name: str, groups: Sequence[JudgedGroup], canaries: Sequence[CanaryResult]
) -> ValidityLine:
    return ValidityLine(
        name=name,
        agreement=agreement(groups),
        evidence=evidence(groups, canaries),
        canaries=tuple(canaries),
    )
