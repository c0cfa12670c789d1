"""Spans of agents, which become steps of trajectories."""

from babylon.migrations import run_file

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    run_file("0010_play_spans.sql")
