"""The fleet's own play beside that of the policy before its champion."""

from babylon.migrations import run_file

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    run_file("0016_fleet_pairs.sql")
