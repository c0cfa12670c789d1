"""The scores on which a sibling was trained."""

from babylon.migrations import run_file

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    run_file("0021_scores_of_siblings.sql")
