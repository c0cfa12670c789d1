"""The state of the deployment: the route, the gateways, and the policies to load."""

from collections.abc import Sequence
from dataclasses import dataclass

from babylon.store.approvals import Approval, open_approvals
from babylon.store.connection import Store
from babylon.store.gateways import GatewayRow, live_gateways
from babylon.store.proposals import Proposal, open_proposals
from babylon.store.routes import Route, current_route


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The route in force, every live gateway, the policies that gateways must load, and those that
    wait for an approval.

    ``settled``: every gateway serves the route.
    """

    route: Route
    gateways: Sequence[GatewayRow]
    proposals: Sequence[Proposal]
    approvals: Sequence[Approval]
    settled: bool


async def deployment_status(store: Store) -> Status:
    """Read the state from the database.

    Raises:
        ServingError: No route was ever committed.
    """
    route = await current_route(store)
    gateways = await live_gateways(store)
    return Status(
        route=route,
        gateways=gateways,
        proposals=await open_proposals(store),
        approvals=await open_approvals(store),
        settled=all(gateway.route_version >= route.route_version for gateway in gateways),
    )
