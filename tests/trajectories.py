from datetime import UTC, datetime
from typing import Any

from babylon.core.trajectories import Trajectory

THEN = datetime(2025, 11, 14, 9, tzinfo=UTC)


def a_trajectory(name: str, **fields: Any) -> Trajectory:
    """A play of one step without a call, trade or profit, but for ``fields``."""
    usual: dict[str, Any] = {
        "trajectory_id": name, "agent_id": name, "window_id": "2025-11-14T09:00",
        "scenario_id": "s", "start": THEN, "end": THEN, "pnl_usd": 0.0, "wins": 0, "trades": 0,
        "actions": 0, "steps": 1, "calls": (),
    }  # fmt: skip
    return Trajectory(**{**usual, **fields})
