"""The stages of a window, its attempts, what was collected, and what came too late."""

from babylon.migrations import run_file

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    run_file("0006_window_states.sql")
