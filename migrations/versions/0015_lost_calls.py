"""The ids of calls that the disk did not take while they were answered."""

from babylon.migrations import run_file

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    run_file("0015_lost_calls.sql")
