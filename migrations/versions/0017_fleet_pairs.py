"""The fleet's own play beside that of the policy before its champion."""

from babylon.migrations import run_file

revision = "0017"
down_revision = "0013"


def upgrade() -> None:
    run_file("0017_fleet_pairs.sql")
