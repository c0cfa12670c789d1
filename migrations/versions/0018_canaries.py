"""A judge's answers to canaries, and its evidence by window."""

from babylon.migrations import run_file

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    run_file("0018_canaries.sql")
