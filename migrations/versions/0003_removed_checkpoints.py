"""Checkpoints are removed to make room; the policy's row stays and says so."""

from babylon.migrations import run_file

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    run_file("0003_removed_checkpoints.sql")
