"""Stage ``publish``: the window's scored trajectories as one immutable file of the dataset.

``datasets/trajectories/month=2025-11/2025-11-14T09-00-<digest>.parquet``: a file is never
rewritten, and publishing the same window again finds the file. ``COLUMNS`` are named one by one, so
that ground truth and the game's raw rows are never published.
"""

import polars as pl

from babylon.core.artifacts import rewrite_artifact
from babylon.core.home import Home
from babylon.core.types import Published, Scored

COLUMNS = (
    "trajectory_id",
    "agent_id",
    "window_id",
    "scenario_id",
    "start",
    "end",
    "pnl_usd",
    "wins",
    "trades",
    "actions",
    "steps",
    "score",
    "calls_json",
)


def publish_window(home: Home, scored: Scored) -> Published:
    """Write the window's file into the local dataset folder."""
    window_id = scored.claim.window_id
    month = window_id[: len("YYYY-MM")]
    file = rewrite_artifact(
        home,
        scored.artifact,
        lambda frame: frame.select(*COLUMNS, month=pl.lit(month)),
        directory=home.datasets / "trajectories" / f"month={month}",
    )
    return Published(window_id=window_id, uri=file.uri, sha256=file.sha256, rows=file.rows)
