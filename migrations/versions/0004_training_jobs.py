"""Training jobs that run on somebody else's machines, known to us before anybody waits for them."""

from babylon.migrations import run_file

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    run_file("0004_training_jobs.sql")
