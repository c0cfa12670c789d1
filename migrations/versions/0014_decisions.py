"""Approvals of deployments, and holds of the schedule."""

from babylon.migrations import run_file

revision = "0014"
down_revision = "0009"


def upgrade() -> None:
    run_file("0014_decisions.sql")
