"""The schema babylon, and the game's tables in a database of our own."""

from babylon.migrations import database_is_ours, run_file

revision = "0001"
down_revision = None


def upgrade() -> None:
    run_file("0001_ownership.sql")
    if database_is_ours():
        run_file("0001_game_tables.sql")
    run_file("0001_babylon_schema.sql")
