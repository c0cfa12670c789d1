"""Spans of agents, which become steps of trajectories."""

from babylon.migrations import run_file

revision = "0011"
down_revision = "0009"


def upgrade() -> None:
    run_file("0011_play_spans.sql")
