"""Scores by trajectory."""

from babylon.migrations import run_concurrently

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    run_concurrently("0020_scores_of_trajectories.sql")
