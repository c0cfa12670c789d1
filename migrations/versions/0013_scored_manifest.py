"""The manifest of the stage ``score`` on each window's row."""

from babylon.migrations import run_file

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    run_file("0013_scored_manifest.sql")
