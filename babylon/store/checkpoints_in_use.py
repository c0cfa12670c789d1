"""Checkpoints that are still in use, over the tables policies, routes, proposals and windows.

Retention reads them, and marks the others as removed, under the lock on routes.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime

from babylon.core.windows import WindowState
from babylon.store.connection import Connection, Store
from babylon.store.policies import lock_routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The facts of a policy that decide about its checkpoint.

    ``pnl`` is from its verdict. ``released``: its play may be trained again, so neither it nor a
    descendant may serve.
    """

    policy_version: int
    parent_version: int | None
    kind: str
    uri: str
    pnl: float | None
    removed: bool
    released: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """All policies and their uses.

    ``routed``: the champion of every route, oldest first.
    ``in_use``: policies that serve now, are proposed, or are needed by windows in work.
    """

    policies: tuple[Held, ...]
    routed: tuple[int, ...]
    in_use: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkedWindow:
    """State of a window's training."""

    epoch: int
    state: WindowState
    updated_at: datetime


@asynccontextmanager
async def holding(store: Store) -> AsyncIterator[tuple[Connection, Holdings]]:
    """Open a transaction in which no route changes, so that no unused policy is promoted."""
    async with store.pool.acquire() as connection, connection.transaction():
        await lock_routes(connection)
        policies = await connection.fetch(_POLICIES)
        routed = await connection.fetch(
            "SELECT policy_version FROM babylon.routes ORDER BY route_version"
        )
        in_use = await connection.fetch(_IN_USE)
        yield (
            connection,
            Holdings(
                policies=tuple(
                    Held(**{**row, "uri": store.home.resolve(row["uri"])}) for row in policies
                ),
                routed=tuple(row["policy_version"] for row in routed),
                in_use=frozenset(row["policy_version"] for row in in_use),
            ),
        )


async def mark_removed(connection: Connection, versions: Sequence[int]) -> None:
    """Mark checkpoints as removed. After the commit they can be neither promoted nor read."""
    await connection.execute(
        "UPDATE babylon.policies SET removed_at = now() WHERE policy_version = ANY($1)", versions
    )


async def checkpoints(store: Store) -> dict[str, bool]:
    """Return each policy's directory → True if its checkpoint was removed."""
    rows = await store.pool.fetch("SELECT uri, removed_at IS NOT NULL FROM babylon.policies")
    return {store.home.resolve(uri): removed for uri, removed in rows}


async def worked_windows(store: Store) -> dict[str, WorkedWindow]:
    """Return each window id → the state of its training."""
    rows = await store.pool.fetch("SELECT window_id, epoch, state, updated_at FROM babylon.windows")
    return {
        row["window_id"]: WorkedWindow(
            epoch=row["epoch"], state=WindowState(row["state"]), updated_at=row["updated_at"]
        )
        for row in rows
    }


_POLICIES = """
SELECT policy_version, parent_version, kind, uri, (verdict->>'pnl_after')::float8 AS pnl,
       removed_at IS NOT NULL AS removed, r.policy_version IS NOT NULL AS released
FROM babylon.policies LEFT JOIN babylon.releases r USING (policy_version)
ORDER BY policy_version
"""

# A trained window will be validated: its policy plays against its parent. A window in work trains
# from a policy that was in force when the window reached its stage, or later. Gateways load the
# proposed policies.
_IN_USE = """
SELECT unnest(ARRAY[policy_version, parent_version]) AS policy_version
FROM babylon.policies JOIN babylon.windows USING (batch_id)
WHERE state = 'trained'
UNION
SELECT unnest(ARRAY[policy_version, challenger_version])
FROM (SELECT policy_version, challenger_version,
             lead(created_at) OVER (ORDER BY route_version) AS until
      FROM babylon.routes) AS reign
WHERE until IS NULL OR until >= (SELECT min(updated_at) FROM babylon.windows
                                 WHERE state IN ('claimed', 'collected', 'validated', 'scored')
                                   AND lease_until > now())
UNION
SELECT policy_version FROM babylon.proposals WHERE outcome IS NULL AND open_until > now()
"""
