"""The ids of calls that the disk did not take while they were answered."""

from babylon.migrations import run_file

revision = "0016"
down_revision = "0013"


def upgrade() -> None:
    run_file("0016_lost_calls.sql")
