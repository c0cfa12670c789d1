"""References to files relative to the home, and marks for retention."""

from babylon.migrations import run_file

revision = "0004"
down_revision = "0002"


def upgrade() -> None:
    run_file("0004_state.sql")
