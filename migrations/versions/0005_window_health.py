"""Health of windows, and the progress of imports."""

from babylon.migrations import run_file

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    run_file("0005_window_health.sql")
