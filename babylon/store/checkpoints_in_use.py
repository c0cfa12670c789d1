"""What Postgres knows of who still needs a checkpoint, read and marked under the lock on routes."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from babylon.core.windows import WindowState
from babylon.store.connection import Store
from babylon.store.routes import lock_routes

if TYPE_CHECKING:
    from babylon.store.connection import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A policy as far as keeping its checkpoint goes; ``pnl`` is that of its verdict."""

    policy_version: int
    parent_version: int | None
    kind: str
    uri: str
    pnl: float | None
    removed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Every policy, the champion of every route (oldest first), whoever challenged one, and what
    serves now or is proposed, or windows at work refer to."""

    policies: tuple[Held, ...]
    routed: tuple[int, ...]
    challenged: frozenset[int]
    in_use: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkedWindow:
    """Where the training of a window is."""

    epoch: int
    state: WindowState
    updated_at: datetime


@asynccontextmanager
async def holding(store: Store) -> AsyncIterator[tuple["Connection", Holdings]]:
    """A transaction in which no route changes: what nobody needs now, nobody promotes meanwhile."""
    async with store.pool.acquire() as connection, connection.transaction():
        await lock_routes(connection)
        policies = await connection.fetch(_POLICIES)
        routed = await connection.fetch(
            "SELECT policy_version, challenger_version FROM babylon.routes ORDER BY route_version"
        )
        challengers = {row["challenger_version"] for row in routed} - {None}
        in_use = await connection.fetch(_IN_USE)
        yield (
            connection,
            Holdings(
                policies=tuple(Held(**row) for row in policies),
                routed=tuple(row["policy_version"] for row in routed),
                challenged=frozenset(challengers),
                in_use=frozenset(row["policy_version"] for row in in_use),
            ),
        )


async def mark_removed(connection: "Connection", versions: Sequence[int]) -> None:
    """From the commit on these policies can neither be promoted nor read."""
    await connection.execute(
        "UPDATE babylon.policies SET removed_at = now() WHERE policy_version = ANY($1)", versions
    )


async def forget_arms(store: Store, after: timedelta) -> None:
    """Which arm each trajectory had, of experiments that ended longer ago than that: nothing of
    them is played, collected or analysed by that any more."""
    await store.pool.execute(_FORGET_ARMS, after)


async def checkpoints(store: Store) -> dict[str, bool]:
    """Where the checkpoint of each policy lies or lay → was it removed?"""
    rows = await store.pool.fetch("SELECT uri, removed_at IS NOT NULL FROM babylon.policies")
    return {uri: removed for uri, removed in rows}


async def worked_windows(store: Store) -> dict[str, WorkedWindow]:
    """Window id → where its training is."""
    rows = await store.pool.fetch("SELECT window_id, epoch, state, updated_at FROM babylon.windows")
    return {
        row["window_id"]: WorkedWindow(
            epoch=row["epoch"],
            state=WindowState(row["state"]),
            updated_at=row["updated_at"],
        )
        for row in rows
    }


_POLICIES = """
SELECT policy_version, parent_version, kind, uri, (verdict->>'pnl_after')::float8 AS pnl,
       removed_at IS NOT NULL AS removed
FROM babylon.policies
ORDER BY policy_version
"""

_FORGET_ARMS = """
DELETE FROM babylon.trajectory_arms WHERE salt IN (
    SELECT salt
    FROM (SELECT salt, lead(created_at) OVER (ORDER BY route_version) AS until
          FROM babylon.routes) AS reign
    WHERE salt IS NOT NULL GROUP BY salt
    HAVING bool_and(until IS NOT NULL) AND max(until) < now() - $1::interval
)
"""

# A trained window is yet to be validated: its policy plays against its parent. One in work
# trains a policy that was in force when it reached its stage, or later. Gateways load what is
# proposed.
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
