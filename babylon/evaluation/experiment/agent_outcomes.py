"""Agents' mean outcomes by stage: the input of every comparison of the arms.

A stage is a period in which the challenger's share is constant. Within a stage, an agent counts in
the arm it was first exposed to (intention to treat), because only the first exposure is random. A
trajectory keeps its arm, so all of it belongs to the stage in which it began.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """An agent's arm in a stage. ``unit`` is the agent, or the API key of unnamed agents."""

    unit: str
    stage: int
    challenger: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Outcomes by hour: an entry ``[k]`` per hour of each row of ``AgentOutcomes``.

    ``row``: index of the row. ``hour``: index of the hour. ``plays``: number of plays.
    ``total``: sum of their outcomes.
    """

    row: Ints
    hour: Ints
    plays: Floats
    total: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcomes:
    """A measure of all agents: one row ``[c]`` per agent and stage.

    ``unit``: index of the agent. ``mean``: mean over its ``plays`` in the stage. ``spread``: sum of
    their squared deviations from ``mean``. ``before``: the agent's mean before the experiment, NaN
    if it has none. ``cells``: the same outcomes by hour, None if they have none.
    """

    unit: Ints
    stage: Ints
    challenger: NDArray[np.bool_]
    mean: Floats
    plays: Floats
    spread: Floats
    before: Floats
    cells: Cells | None = None

    @property
    def groups(self) -> Ints:
        """``[c]`` each row's stage and arm as one number."""
        return 2 * self.stage + self.challenger

    def only(self, kept: NDArray[np.bool_]) -> Self:
        """Return the rows ``[c]`` that are kept."""
        cells = self.cells
        if cells is not None:
            mine = kept[cells.row]
            cells = Cells(
                row=(np.cumsum(kept) - 1)[cells.row[mine]],
                hour=cells.hour[mine],
                plays=cells.plays[mine],
                total=cells.total[mine],
            )
        return replace(
            self,
            unit=self.unit[kept],
            stage=self.stage[kept],
            challenger=self.challenger[kept],
            mean=self.mean[kept],
            plays=self.plays[kept],
            spread=self.spread[kept],
            before=self.before[kept],
            cells=cells,
        )


def outcomes_of_plays(
    exposures: Sequence[Exposure],
    plays: Sequence[tuple[str, int, float]],
    before: dict[str, float],
    hours: Sequence[int] | None = None,
) -> AgentOutcomes:
    """Average the plays of each exposure. Exposures without plays are left out.

    Args:
        plays: (unit, stage, outcome) of each; plays without an exposure are ignored.
        before: Mean before the experiment, by unit.
        hours: The hour of each play, as any number. Without them, all plays of an agent are
            taken as independent of all others'.
    """
    known, index = _exposure_of(plays, exposures)
    values = np.array([value for _, _, value in plays], float)[known]
    count = np.bincount(index, minlength=len(exposures)).astype(float)
    played = count > 0
    mean = np.bincount(index, values, len(exposures)) / np.maximum(count, 1)
    spread = np.bincount(index, (values - mean[index]) ** 2, len(exposures)).astype(float)
    outcomes = agent_outcomes(
        [one for one, has in zip(exposures, played, strict=True) if has],
        mean[played],
        before,
        plays=count[played],
        spread=spread[played],
    )
    if hours is None:
        return outcomes
    row = (np.cumsum(played) - 1)[index]  # exposures without plays are not among the outcomes
    return replace(outcomes, cells=_cells(row, np.array(hours, np.int64)[known], values))


def _exposure_of(
    plays: Sequence[tuple[str, int, float]], exposures: Sequence[Exposure]
) -> tuple[Ints, Ints]:
    """Return the numbers of the plays with an exposure, and the number of each one's exposure."""
    place = {(one.unit, one.stage): i for i, one in enumerate(exposures)}
    index = np.array([place.get((unit, stage), -1) for unit, stage, _ in plays], np.int64)
    known = np.flatnonzero(index >= 0)
    return known, index[known]


def _cells(row: Ints, hours: Ints, values: Floats) -> Cells:
    rows, hour, cell = pairs(row, hours)
    return Cells(
        row=rows,
        hour=hour,
        plays=np.bincount(cell).astype(float),
        total=np.bincount(cell, values).astype(float),
    )


def agent_outcomes(
    exposures: Sequence[Exposure],
    mean: Floats,
    before: dict[str, float] | None = None,
    *,
    plays: Floats | None = None,
    spread: Floats | None = None,
) -> AgentOutcomes:
    """Return the outcomes ``mean`` of exposures, each of one play by default."""
    numbers = {unit: i for i, unit in enumerate(dict.fromkeys(one.unit for one in exposures))}
    history = before or {}
    return AgentOutcomes(
        unit=np.array([numbers[one.unit] for one in exposures], np.int64),
        stage=np.array([one.stage for one in exposures], np.int64),
        challenger=np.array([one.challenger for one in exposures], bool),
        mean=np.asarray(mean, float),
        plays=np.ones(len(exposures)) if plays is None else plays,
        spread=np.zeros(len(exposures)) if spread is None else spread,
        before=np.array([history.get(one.unit, np.nan) for one in exposures], float),
    )


def pairs(first: Ints, hour: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the distinct pairs in order, as two arrays, and the index of each element's pair."""
    start = hour.min(initial=0)
    width = hour.max(initial=0) - start + 1
    keys, place = np.unique(first * width + (hour - start), return_inverse=True)
    return keys // width, keys % width + start, place
