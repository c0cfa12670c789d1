"""Our own schema: windows, calls, policies, routes, gateways, scores."""

from babylon.migrations import run_file

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    run_file("0002_babylon_schema.sql")
