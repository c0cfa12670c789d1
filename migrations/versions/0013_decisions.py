"""Approvals of deployments, and holds of the schedule."""

from babylon.migrations import run_file

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    run_file("0013_decisions.sql")
