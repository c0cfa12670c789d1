"""Postgres is the source of truth: windows and their leases, policies, routes, recorded calls."""

from babylon.store.connection import (
    DatabaseStatus,
    Store,
    database_status,
    open_store,
    require_game_tables,
)

__all__ = ["DatabaseStatus", "Store", "database_status", "open_store", "require_game_tables"]
