"""The default scorer. It needs no judge, no key and no network.

    score = 0.5 * profit + 0.3 * win_rate + 0.2 * activity

    profit    (pnl_usd - min) / (max - min) over the window's trajectories; 0.5 if all are equal
    win_rate  wins / trades, 0 without a decided trade
    activity  actions / steps: the share of steps other than HOLD

Each part lies in [0, 1], and so does the score.
"""

from collections.abc import Sequence

from babylon.core.trajectories import Trajectory
from babylon.scoring.scorer import Score

WEIGHTS = {"profit": 0.5, "win_rate": 0.3, "activity": 0.2}


def heuristic(trajectories: Sequence[Trajectory]) -> list[Score]:
    """Return one score in [0, 1] for each trajectory, with its three parts."""
    profits = [trajectory.pnl_usd for trajectory in trajectories]
    low, high = min(profits, default=0.0), max(profits, default=0.0)
    return [_score(trajectory, low, high) for trajectory in trajectories]


def _score(trajectory: Trajectory, low: float, high: float) -> Score:
    components = {
        "profit": (trajectory.pnl_usd - low) / (high - low) if high > low else 0.5,
        "win_rate": trajectory.win_rate,
        "activity": trajectory.actions / trajectory.steps,
    }
    return Score(sum(WEIGHTS[part] * value for part, value in components.items()), components)
