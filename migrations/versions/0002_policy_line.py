"""The policy line, what happened to each trajectory's learning, and the attempts of a window."""

from babylon.migrations import run_file

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    run_file("0002_policy_line.sql")
