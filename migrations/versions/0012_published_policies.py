"""The ledger of published policies."""

from babylon.migrations import run_file

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    run_file("0012_published_policies.sql")
