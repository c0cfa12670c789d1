"""API keys; who made a call, with which parameters; until when a gateway's calls are stored."""

from babylon.migrations import run_file

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    run_file("0009_serving.sql")
