"""The table ``routes``: append-only; the newest row is in force.

Gateways listen on the channel ``babylon_routes`` and announce the route that they serve
(``babylon.store.gateways``). A change is complete when every live gateway serves the new route.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from babylon.core.errors import ModelError, RouteConflictError, ServingError
from babylon.core.failpoints import failpoint
from babylon.core.types import Claim
from babylon.store.connection import Connection, Store, guarded
from babylon.store.lineage import descends
from babylon.store.policies import (
    Policy,
    get_policy,
    lock_routes,
    require_champion,
    superseded_by,
)

CHANNEL = "babylon_routes"
RESTORER = "babylon"  # author of routes that restore the policy before, after a failed change
Mode = Literal["replace", "ab", "canary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The challenger's arm of a route.

    ``share``, greater than 0 and less than 1, is the part of the agents that the challenger
    answers. ``salt`` identifies the experiment and selects those agents by hash.
    """

    mode: Mode
    challenger_version: int
    share: float
    salt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A route: the champion (``policy_version``) and, in an experiment, a challenger."""

    route_version: int
    policy_version: int
    author: str
    reason: str
    created_at: datetime
    mode: Mode = "replace"
    challenger_version: int | None = None
    share: float | None = None
    salt: str | None = None

    @property
    def versions(self) -> frozenset[int]:
        """Versions of the policies that serve."""
        versions = (self.policy_version, self.challenger_version)
        return frozenset(version for version in versions if version is not None)

    @property
    def split(self) -> Split | None:
        """The challenger's arm, ``None`` outside an experiment."""
        if self.challenger_version is None or self.share is None or self.salt is None:
            return None
        return Split(
            mode=self.mode,
            challenger_version=self.challenger_version,
            share=self.share,
            salt=self.salt,
        )


async def current_route(store: Store) -> Route:
    """Return the route in force.

    Raises:
        ServingError: no route was ever committed.
    """
    routes = await list_routes(store, limit=1)
    if not routes:
        raise ServingError("no policy is routed yet: run `babylon model init`")
    return routes[0]


async def list_routes(store: Store, limit: int | None = 100) -> list[Route]:
    """Return routes, newest first; ``None``: all of them."""
    rows = await store.pool.fetch(
        "SELECT * FROM babylon.routes ORDER BY route_version DESC LIMIT $1", limit
    )
    return [Route(**row) for row in rows]


async def commit_route(
    store: Store,
    *,
    policy_version: int,
    author: str,
    reason: str,
    expected_route_version: int,
    split: Split | None = None,
    claim: Claim | None = None,
    candidate: int | None = None,
) -> int:
    """Make a policy champion, with ``split`` beside a challenger.

    ``expected_route_version`` is the route on which the caller decided. ``candidate`` is the policy
    that a window sends out, as champion or challenger: its parent must be the champion.

    Returns:
        The new route version.

    Raises:
        RouteConflictError: another route is in force than the expected one.
        ModelError: no policy has that version, or its checkpoint was removed.
        FencedError: ``claim`` is stale.
        SupersededError: the candidate's parent is not the champion.
    """
    failpoint("route.before")
    async with _transaction(store, claim) as connection:
        # No route, proposal or removal of a checkpoint may come between checks and insert.
        await lock_routes(connection)
        await _require_route(connection, expected_route_version)
        if candidate is not None:
            await require_champion(connection, await _parent_of(connection, candidate))
        version = expected_route_version + 1
        await require_present(connection, policy_version)
        if split:
            await require_present(connection, split.challenger_version)
        await connection.execute(
            "INSERT INTO babylon.routes (route_version, policy_version, author, reason, mode,"
            " challenger_version, share, salt) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
            version,
            policy_version,
            author,
            reason,
            split.mode if split else "replace",
            split and split.challenger_version,
            split and split.share,
            split and split.salt,
        )
        if store.game_tables_ours:
            await connection.execute(_RETIRE_AND_DEPLOY, f"babylon-v{policy_version}")
        await connection.execute("SELECT pg_notify($1, $2)", CHANNEL, str(version))
        failpoint("route.inserted")
    failpoint("route.after")
    return version


async def may_serve(store: Store, policy_version: int) -> bool:
    """Return True if a policy has its checkpoint and its play was not released."""
    async with store.pool.acquire() as connection:
        try:
            await require_present(connection, policy_version)
        except ModelError:
            return False
    return True


async def require_present(connection: Connection, policy_version: int) -> None:
    """Check that a policy has its checkpoint.

    The caller holds the lock on routes, which retention takes too, so the checkpoint stays.

    Raises:
        ModelError: there is no such policy, its checkpoint was removed, or its play was released.
    """
    row = await connection.fetchrow(
        "SELECT removed_at FROM babylon.policies WHERE policy_version = $1", policy_version
    )
    if row is None:
        raise ModelError(f"there is no policy version {policy_version}: see `babylon model list`")
    if removed := row["removed_at"]:
        raise ModelError(
            f"the checkpoint of policy {policy_version} was removed at {removed:%Y-%m-%d %H:%M} UTC"
            " (KEEP_CHECKPOINTS): `babylon model list` shows those that are there; promote one"
        )
    if (released := await connection.fetchval(_RELEASED, policy_version)) is not None:
        raise ModelError(
            f"policy {policy_version} was trained on play that policy {released} released: another"
            " policy may be trained on it, so this one never serves again (`babylon model lineage`)"
        )


# The policy itself, or an ancestor, of which the play was released.
_RELEASED = """
WITH RECURSIVE line AS (
    SELECT policy_version, parent_version FROM babylon.policies WHERE policy_version = $1
    UNION
    SELECT p.policy_version, p.parent_version
    FROM babylon.policies p JOIN line ON p.policy_version = line.parent_version
)
SELECT policy_version FROM line JOIN babylon.releases USING (policy_version) LIMIT 1
"""


async def _parent_of(connection: Connection, policy_version: int) -> int:
    parent: int = await connection.fetchval(
        "SELECT parent_version FROM babylon.policies WHERE policy_version = $1", policy_version
    )
    return parent


async def _require_route(connection: Connection, expected: int) -> None:
    current = await connection.fetchval("SELECT max(route_version) FROM babylon.routes") or 0
    if current != expected:
        raise RouteConflictError(
            f"the route is at version {current}, not {expected}:"
            " see `babylon model list` and decide again"
        )


@asynccontextmanager
async def _transaction(store: Store, claim: Claim | None) -> AsyncIterator[Connection]:
    if claim is not None:
        async with guarded(store, claim) as connection:
            yield connection
    else:
        async with store.pool.acquire() as connection, connection.transaction():
            yield connection


_RETIRE_AND_DEPLOY = """
UPDATE trained_models SET "updatedAt" = now(),
    status = CASE WHEN "modelId" = $1 THEN 'deployed' ELSE 'archived' END,
    "deployedAt" = CASE WHEN "modelId" = $1 THEN now() ELSE "deployedAt" END,
    "archivedAt" = CASE WHEN "modelId" = $1 THEN NULL ELSE now() END
WHERE "modelId" = $1 OR status = 'deployed'
"""


async def all_routes(store: Store) -> list[Route]:
    """Return the routes, newest first."""
    return await list_routes(store, limit=None)


async def champions_of(store: Store, route_versions: Iterable[int]) -> dict[int, int]:
    """Return route version → version of its champion, of these routes."""
    rows = await store.pool.fetch(
        "SELECT route_version, policy_version FROM babylon.routes WHERE route_version = ANY($1)",
        list(route_versions),
    )
    return {row["route_version"]: row["policy_version"] for row in rows}


async def previous_champion(store: Store) -> Policy:
    """Return the policy to roll back to: the one that the present champion replaced.

    Raises:
        ModelError: no other policy was champion.
    """
    routes = reversed(await all_routes(store))
    served = champions([route.policy_version for route in routes])
    if len(served) < 2:
        raise ModelError(
            "no other policy served before, there is nothing to roll back to: name one with"
            " `babylon deploy replace`"
        )
    return await get_policy(store, served[-2])


def champions(routed: Iterable[int]) -> list[int]:
    """Reduce the champions of all routes, oldest first, to those that replaced one another.

    A route back to an earlier policy drops the policies in between. A second rollback, or a
    rollback after a failed deployment, then never leads to an abandoned policy. Challengers
    replace nobody.
    """
    served: dict[int, None] = {}
    for version in routed:
        while version in served:
            served.popitem()
        served[version] = None
    return list(served)


def same_champion_since(routes: Sequence[Route], route_version: int) -> bool:
    """Return True if the champion did not change since that route. ``routes``: newest first."""
    since = {route.policy_version for route in routes if route.route_version >= route_version}
    return len(since) == 1


def taken_back(routes: Sequence[Route], policy_version: int) -> Route | None:
    """Return the route that last ended the policy's turn as champion or challenger.

    ``None``: it never had a turn, or still has it. ``routes``: newest first.
    """
    after: Route | None = None
    for route in routes:
        if policy_version in route.versions:
            return after
        after = route
    return None


def earlier_turn_ended(routes: Sequence[Route], policy_version: int) -> datetime | None:
    """Return when the champion's turn before the present one ended; ``None``: this is its first.

    ``routes``: newest first.
    """
    ended: datetime | None = None
    for route in routes:
        if route.policy_version != policy_version:
            ended = route.created_at
        elif ended:
            return ended
    return None


async def superseded(store: Store, policy: Policy) -> str | None:
    """Return the reason why a window's policy can never be deployed, None if it still may be.

    Its parent no longer leads, and it was neither rejected nor in force itself: nobody decided
    against it.
    """
    routes, version = await all_routes(store), policy.policy_version
    leading, parent = routes[0].policy_version, policy.parent_version
    if parent is None or leading == parent or version in routes[0].versions:
        return None
    if policy.verdict is not None and not policy.verdict["promote"]:
        return None
    if (after := taken_back(routes, version)) and after.author != RESTORER:
        return None
    if await descends(store, leading, version):
        return None
    return superseded_by(parent, leading)
