"""The desired state of the gateways: the route in force and the policies that are proposed."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from babylon.core.errors import ModelError
from babylon.store.connection import Connection, Pool, Store
from babylon.store.gateways import GatewayRow, live_gateways
from babylon.store.policies import NO_POLICY
from babylon.store.routes import Route, lock_routes

_HALTED_S = 10.0  # a gateway that halts while it holds the lock loses it after this time


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """The route in force, the champion before this one, and the open proposals.

    ``proposals`` maps each proposed policy version to its newest open proposal.
    """

    route: Route
    previous: int | None
    proposals: Mapping[int, int]


async def desired(store: Store) -> Desired:
    """Read the desired state.

    Raises:
        ModelError: there is no policy yet.
    """
    return await _read(store.pool)


@asynccontextmanager
async def lock_desired(store: Store) -> AsyncIterator[tuple[Desired, list[GatewayRow]]]:
    """Block new routes and proposals; yield the desired state and the live gateways."""
    async with store.pool.acquire() as connection, connection.transaction():
        await lock_routes(connection, _HALTED_S)
        yield await _read(connection), await live_gateways(store)


async def _read(database: "Pool | Connection") -> Desired:
    row = await database.fetchrow(_DESIRED)
    if row is None:
        raise ModelError(NO_POLICY)
    fields = dict(row)
    previous, versions, ids = (fields.pop(name) for name in ("previous", "versions", "proposals"))
    return Desired(
        route=Route(**fields),
        previous=previous,
        proposals=dict(zip(versions or (), ids or (), strict=True)),
    )


# One statement reads one moment. Two could miss a policy whose proposal closes while its route is
# committed, and the gateway would unload it.
_DESIRED = """
SELECT route.*,
       (SELECT policy_version FROM babylon.routes AS before
        WHERE before.policy_version <> route.policy_version
        ORDER BY route_version DESC LIMIT 1) AS previous,
       opened.*
FROM babylon.routes AS route,
     (SELECT array_agg(policy_version ORDER BY proposal_id) AS versions,
             array_agg(proposal_id ORDER BY proposal_id) AS proposals
      FROM babylon.proposals WHERE outcome IS NULL AND open_until > now()) AS opened
ORDER BY route_version DESC LIMIT 1
"""
