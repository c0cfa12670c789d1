"""Trajectories with their owners, steps that are not finished yet, and feedback."""

from babylon.migrations import run_file

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    run_file("0008_plays.sql")
