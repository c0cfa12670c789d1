"""Luck that the plays of an hour share: how much wider it makes the difference's interval.

Agents of one policy that bet alike on one market win or lose together, so they are not independent
within an hour. The difference's variance is therefore clustered by agent and by hour (Cameron,
Gelbach, Miller 2011, "Robust inference with multiway clustering", equation 2.9). The variance by
hour is added to the variance by agent, and the variance by cell is subtracted. A cell is an
agent's plays of one hour. What an hour brings to both arms cancels in its sum.

The arms' means are subtracted within each stage, so the sums of a stage with W hours show only
1 - 1/W of their variance. Hours do not weigh alike; W is Kish's effective number. A stage of few
hours shows too little of it, and gets what longer stages show.

Luck may last for several hours. Sums of hours in sequence are taken as autoregressive, which
multiplies their variance.
"""

import math
from dataclasses import dataclass

import numpy as np

from babylon.evaluation.experiment.agent_outcomes import AgentOutcomes, Floats, Ints, pairs

FEWEST = 4  # hours of equal weight; of fewer, the sums may all be alike by chance
_ONE_PERCENT = -2.326  # quantile of the normal distribution
_MOST_LASTING = 0.9  # correlation of two hours in sequence
_ROUNDING = 1e-9
_TINY = 1e-300  # instead of 0 as a divisor


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLuck:
    """The difference's variance by hour.

    ``excess``: what it adds to the variance by agent. ``by_hour``: the estimate itself, with its
    degrees of ``freedom``. ``alike``: number of cells of an hour that are worth one independent
    cell, by the upper end of that estimate. ``hours``: number of hours that the arm with fewer
    hours played.
    """

    excess: float = 0.0
    by_hour: float = 0.0
    freedom: float = math.inf
    alike: float = 1.0
    hours: int = 1

    def added_to(self, variance: float, freedom: float) -> tuple[float, float]:
        """Return the sum with the variance by agent, and its degrees of freedom (Satterthwaite).

        A sum of two variances has at least the freedom of the one that has less.
        """
        total = variance + self.excess
        squares = variance**2 / freedom + self.by_hour**2 / self.freedom
        whole = total**2 / squares if squares else math.inf
        return total, max(whole, min(freedom, self.freedom))

    def independent(self, plays: float) -> float:
        """Return the number of independent plays that are worth as much as ``plays``."""
        return max(plays / max(self.alike, 1.0), min(plays, self.hours))


def shared_luck(outcomes: AgentOutcomes, within: Floats, influence: Floats) -> SharedLuck | None:
    """Estimate the shared luck; None with fewer than four hours. ``SharedLuck()`` without cells.

    Args:
        within: ``[c]`` the outcomes minus the mean of their arm and stage.
        influence: ``[c]`` weight of each outcome in the difference.
    """
    if (cells := outcomes.cells) is None:
        return SharedLuck()
    row, of_play = cells.row, influence / outcomes.plays
    part = of_play[row] * (cells.total - cells.plays * (outcomes.mean - within)[row])
    stage, hour, place = pairs(outcomes.stage[row], cells.hour)
    weight = np.bincount(place, np.abs(of_play)[row] * cells.plays)
    squares = np.bincount(stage, weight**2).astype(float)
    seen = _seen(squares, np.bincount(stage, weight).astype(float))
    visible = float(squares @ seen)
    freedom = visible**2 / max(float(squares**2 @ (seen * (1 - seen))), _TINY)
    if freedom < FEWEST - 1 - _ROUNDING:
        return None
    scale, sums = float(squares.sum()) / visible, np.bincount(place, part).astype(float)
    in_turn = float(sums**2 @ (seen[stage] > 0)) * scale  # as if luck never lasted
    by_hour = in_turn * _lasting(sums, stage, hour)
    by_cell = float(part**2 @ seen[outcomes.stage[row]]) * scale
    return SharedLuck(
        excess=max(by_hour - by_cell, 0.0),
        by_hour=by_hour,
        freedom=freedom,
        alike=in_turn / by_cell / _lower(freedom) if by_cell else math.inf,
        hours=min(len(np.unique(cells.hour[outcomes.challenger[row] == arm])) for arm in (0, 1)),
    )


def _seen(squares: Floats, whole: Floats) -> Floats:
    """Return 1 - 1/W of each stage: the share of its hours' variance that its sums show.

    If any stage has ``FEWEST`` hours, a stage with fewer counts as one that shows nothing.
    """
    seen: Floats = 1 - squares / np.where(whole > 0, whole, 1) ** 2
    enough = (whole > 0) & (seen >= 1 - 1 / FEWEST - _ROUNDING)
    return np.where(enough if enough.any() else seen > _ROUNDING, seen, 0.0)


def _lasting(sums: Floats, stage: Ints, hour: Ints) -> float:
    """Return the variance of a mean of autoregressive values, over that of independent ones.

    Their correlation is corrected for its bias in few hours (Kendall 1954).
    """
    follows = (np.diff(stage) == 0) & (np.diff(hour) == 1)
    steps, squares = int(follows.sum()), float(sums @ sums)
    if not (steps and squares):
        return 1.0
    seen = float(sums[1:] @ (sums[:-1] * follows)) / steps / (squares / len(sums))
    correlation = min(max(seen + (1 + 3 * seen) / len(sums), 0.0), _MOST_LASTING)
    return (1 + correlation) / (1 - correlation)


def _lower(freedom: float) -> float:
    """Return the 1 % quantile of chi-square over its degrees of freedom (Wilson, Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return max(1 - spread + _ONE_PERCENT * math.sqrt(spread), 0.05) ** 3
