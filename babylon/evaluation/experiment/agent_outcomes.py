"""What agents came to, stage by stage: the form in which every measure is compared.

A stage is a time of one share. Within it, an agent is counted in the arm that it was first exposed
to, whatever happened after (intention to treat), because that alone is random.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """An agent (or an API key that speaks for agents without a name) in a stage."""

    unit: str
    stage: int
    challenger: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcomes:
    """One row ``[c]`` an agent and stage.

    ``unit``: index of the agent; ``outcome``: mean over its ``plays`` in the stage; ``spread``:
    their squared deviations from it, summed; ``before``: the agent's mean before the experiment,
    NaN where there is none.
    """

    unit: Ints
    stage: Ints
    challenger: NDArray[np.bool_]
    mean: Floats
    plays: Floats
    spread: Floats
    before: Floats

    @property
    def groups(self) -> Ints:
        """``[c]`` the stage and arm of each cell as one number."""
        return 2 * self.stage + self.challenger


def outcomes_of_plays(
    exposures: Sequence[Exposure],
    plays: Sequence[tuple[str, int, float]],
    before: dict[str, float],
) -> AgentOutcomes:
    """AgentOutcomes of the exposures that have plays.

    Args:
        plays: unit, stage and outcome of each; those of no exposure are left out.
        before: by unit.
    """
    place = {(one.unit, one.stage): i for i, one in enumerate(exposures)}
    known = [(place[unit, stage], value) for unit, stage, value in plays if (unit, stage) in place]
    index = np.array([i for i, _ in known], np.int64)
    values = np.array([value for _, value in known], float)
    count = np.bincount(index, minlength=len(exposures)).astype(float)
    played = count > 0
    mean = np.bincount(index, values, len(exposures)) / np.maximum(count, 1)
    squares = (values - mean[index]) ** 2
    spread = np.bincount(index, squares, len(exposures)).astype(float)
    return agent_outcomes(
        [one for one, has in zip(exposures, played, strict=True) if has],
        mean[played],
        before,
        plays=count[played],
        spread=spread[played],
    )


def agent_outcomes(
    exposures: Sequence[Exposure],
    mean: Floats,
    before: dict[str, float] | None = None,
    *,
    plays: Floats | None = None,
    spread: Floats | None = None,
) -> AgentOutcomes:
    """One outcome an exposure; where nothing else is known, each is one play."""
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
