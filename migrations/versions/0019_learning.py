"""Replies sampled for preferences, and populations of training settings."""

from babylon.migrations import run_file

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    run_file("0019_learning.sql")
