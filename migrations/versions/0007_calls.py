"""Keys with the scope ``record``."""

from babylon.migrations import run_file

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    run_file("0007_calls.sql")
