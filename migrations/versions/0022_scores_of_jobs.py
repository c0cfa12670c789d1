"""The scores on which a provider trains."""

from babylon.migrations import run_file

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    run_file("0022_scores_of_jobs.sql")
