"""Keys that prove which gateway answers, and gateways that do not follow."""

from babylon.migrations import run_file

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    run_file("0014_gateways_of_many_hosts.sql")
