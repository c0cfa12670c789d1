"""Each judge's agreement with outcomes, by window and over its last windows."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidityLine:
    """Agreement and evidence of one window or of several, under a name."""

    name: str
    agreement: Agreement | None
    evidence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReport:
    """A judge's last windows, newest first, their sum, and the validity for the next window."""

    by: JudgeIdentity
    windows: tuple[ValidityLine, ...]
    recent: ValidityLine
    validity: float


async def read_validity(store: Store) -> list[JudgeReport]:
    """Return a report of each judge that judged any window, the latest first."""
    return [
        _report(by, await judged_before(store, by, WINDOWS)) for by in await known_judges(store)
    ]


def judged_groups(row: WindowValidity) -> list[JudgedGroup]:
    """Return the groups of a stored window."""
    return msgspec.convert(list(row.groups), list[JudgedGroup], strict=False)


def _report(by: JudgeIdentity, rows: Sequence[WindowValidity]) -> JudgeReport:
    every = [group for row in rows for group in judged_groups(row)]
    return JudgeReport(
        by=by,
        windows=tuple(_line(row.window_id, judged_groups(row)) for row in rows),
        recent=_line("all", every),
        validity=learn(every, ranks=by.method == "preference").validity,
    )


def _line(name: str, groups: Sequence[JudgedGroup]) -> ValidityLine:
    return ValidityLine(name=name, agreement=agreement(groups), evidence=evidence(groups))
