"""Opinions of the judge beside outcomes, and cached tokens."""

from babylon.migrations import run_file

revision = "0019"
down_revision = "0013"


def upgrade() -> None:
    run_file("0019_judge_validity.sql")
