"""Postgres: windows and their leases, policies, routes, recorded calls. See docs/store.md."""

from babylon.store.connection import (
    DatabaseStatus,
    Store,
    database_status,
    open_store,
    require_game_tables,
    require_recordable,
)

__all__ = [
    "DatabaseStatus",
    "Store",
    "database_status",
    "open_store",
    "require_game_tables",
    "require_recordable",
]
