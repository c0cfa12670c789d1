"""The ledger of published policies."""

from babylon.migrations import run_file

revision = "0013"
down_revision = "0009"


def upgrade() -> None:
    run_file("0013_published_policies.sql")
