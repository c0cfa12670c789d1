"""Opinions of the judge beside outcomes, and cached tokens."""

from babylon.migrations import run_file

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    run_file("0017_judge_validity.sql")
