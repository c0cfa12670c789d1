"""What judges said and what that cost; intervals and reasons beside the scores."""

from babylon.migrations import run_file

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    run_file("0005_judgments.sql")
