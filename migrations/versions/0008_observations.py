"""What trackers of market outcomes saw, kept where they meet."""

from babylon.migrations import run_file

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    run_file("0008_observations.sql")
