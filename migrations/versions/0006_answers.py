"""The messages of answers that hold more than text: tool calls, reasoning."""

from babylon.migrations import run_file

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    run_file("0006_answers.sql")
