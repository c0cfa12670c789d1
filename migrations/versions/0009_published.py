"""The ledger of the published dataset, and what was taken down."""

from babylon.migrations import run_file

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    run_file("0009_published.sql")
