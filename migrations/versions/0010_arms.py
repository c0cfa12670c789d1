"""Routes with two arms, policies that gateways prepare before a route names them, pinned arms."""

from babylon.migrations import run_file

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    run_file("0010_arms.sql")
