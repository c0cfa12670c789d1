"""A key keeps its id while its secret is replaced."""

from babylon.migrations import run_file

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    run_file("0011_rotated_keys.sql")
