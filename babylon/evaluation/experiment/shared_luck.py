"""Luck that the plays of a window share: how much wider it makes the difference's interval.

Agents of one policy that bet alike on one market win or lose together, so they are not independent
within a window. The difference's variance is therefore clustered by agent and by window (Cameron,
Gelbach, Miller 2011, "Robust inference with multiway clustering", equation 2.9). The variance by
window is added to the variance by agent, and the variance by cell is subtracted. A cell is an
agent's plays of one window. What a window brings to both arms cancels in its sum.

The arms' means are subtracted within each stage, so the sums of a stage with W windows show only
1 - 1/W of their variance. Windows do not weigh alike; W is Kish's effective number. A stage of one
window shows none of it, and gets what the other stages show.

Luck may last for several windows. Sums of windows in sequence are taken as autoregressive, which
multiplies their variance.
"""

import math
from dataclasses import dataclass

import numpy as np

from babylon.evaluation.experiment.agent_outcomes import AgentOutcomes, Floats, Ints, pairs

FEWEST = 4  # windows of equal weight: fewer may be alike by chance, and then show no shared luck
_ONE_PERCENT = -2.326  # quantile of the normal distribution
_MOST_LASTING = 0.9  # correlation of two windows in sequence
_ROUNDING = 1e-9
_TINY = 1e-300  # instead of 0 as a divisor


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLuck:
    """The difference's variance by window.

    ``excess``: what it adds to the variance by agent. ``by_window``: the estimate itself, with its
    degrees of ``freedom``. ``alike``: number of plays of a window that are worth one independent
    play, by the upper end of that estimate. ``windows``: number of windows.
    """

    excess: float = 0.0
    by_window: float = 0.0
    freedom: float = math.inf
    alike: float = 1.0
    windows: int = 1

    def added_to(self, variance: float, freedom: float) -> tuple[float, float]:
        """Return the sum with the variance by agent, and its degrees of freedom (Satterthwaite)."""
        total = variance + self.excess
        squares = variance**2 / freedom + self.by_window**2 / self.freedom
        return total, total**2 / squares if squares else math.inf

    def independent(self, plays: float) -> float:
        """Return the number of independent plays that are worth as much as ``plays``."""
        return max(plays / max(self.alike, 1.0), min(plays, self.windows))


def shared_luck(outcomes: AgentOutcomes, within: Floats, influence: Floats) -> SharedLuck | None:
    """Estimate the shared luck: none without cells; None with fewer than four windows.

    Args:
        within: ``[c]`` the outcomes minus the mean of their arm and stage.
        influence: ``[c]`` weight of each outcome in the difference.
    """
    if (cells := outcomes.cells) is None:
        return SharedLuck()
    row, of_play = cells.row, influence / outcomes.plays
    part = of_play[row] * (cells.total - cells.plays * (outcomes.mean - within)[row])
    stage, window, place = pairs(outcomes.stage[row], cells.window)
    weight = np.bincount(place, np.abs(of_play)[row] * cells.plays)
    squares = np.bincount(stage, weight**2).astype(float)
    seen = _seen(squares, np.bincount(stage, weight).astype(float))
    visible = float(squares @ seen)
    freedom = visible**2 / max(float(squares**2 @ (seen * (1 - seen))), _TINY)
    if freedom < FEWEST - 1 - _ROUNDING:
        return None
    scale, sums = float(squares.sum()) / visible, np.bincount(place, part).astype(float)
    in_turn = float(sums**2 @ (seen[stage] > 0)) * scale  # as if luck never lasted
    by_window = in_turn * _lasting(sums, stage, window)
    by_cell = float(part**2 @ seen[outcomes.stage[row]]) * scale
    return SharedLuck(
        excess=max(by_window - by_cell, 0.0),
        by_window=by_window,
        freedom=freedom,
        alike=in_turn / by_cell / _lower(freedom) if by_cell else math.inf,
        windows=len(np.unique(window)),
    )


def _seen(squares: Floats, whole: Floats) -> Floats:
    """Return 1 - 1/W of each stage: the share of its windows' variance that its sums show."""
    seen: Floats = 1 - squares / np.where(whole > 0, whole, 1) ** 2
    return np.where(seen < _ROUNDING, 0.0, seen)


def _lasting(sums: Floats, stage: Ints, window: Ints) -> float:
    """Return the variance of a mean of autoregressive values, over that of independent ones.

    Their correlation is corrected for its bias in few windows (Kendall 1954).
    """
    follows = (np.diff(stage) == 0) & (np.diff(window) == 1)
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
