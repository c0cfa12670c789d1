"""What a checkpoint's files were when it was committed, and how it stood the checks."""

from babylon.migrations import run_file

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    run_file("0011_checks.sql")
