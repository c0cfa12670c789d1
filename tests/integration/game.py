"""Puts rows into the game's tables, as the game's own writer would."""

from typing import Any

from babylon.core.types import Claim
from babylon.core.windows import parse_window_id
from babylon.store import Store
from babylon.store.windows import claim_window
from tests.conftest import real_rows

WINDOW = parse_window_id("2025-11-14T09:00")
TABLES = {"users": "User"}


async def insert(store: Store, name: str, rows: list[dict[str, Any]]) -> None:
    table = TABLES.get(name, name)
    await store.pool.executemany(
        f'INSERT INTO "{table}" SELECT * FROM jsonb_populate_record(NULL::"{table}", $1)',
        [(row,) for row in rows],
    )


async def insert_real_window(store: Store) -> None:
    for name in ("users", "trajectories", "llm_call_logs", "market_outcomes"):
        await insert(store, name, real_rows(name))


async def insert_trajectories(store: Store, *changes: dict[str, Any]) -> None:
    """Copies of a sound real row; each ``changes`` replaces columns of one, an id for instance."""
    sound = real_rows("trajectories")[0]
    await insert(store, "users", [{**real_rows("users")[0], "id": sound["agentId"]}])
    await insert(
        store, "trajectories", [{**sound, "id": row["trajectoryId"], **row} for row in changes]
    )


async def claim(store: Store) -> Claim:
    return await claim_window(store, WINDOW, owner="test", lease_s=60)
