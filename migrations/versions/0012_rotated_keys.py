"""A key keeps its id while its secret is replaced."""

from babylon.migrations import run_file

revision = "0012"
down_revision = "0009"


def upgrade() -> None:
    run_file("0012_rotated_keys.sql")
