"""``babylon deploy``: which policy answers the agents, and who serves it."""

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from babylon.cli.model import Version, route_to, show_values, with_store
from babylon.cli.options import Json

if TYPE_CHECKING:
    from babylon.store import Store

app = typer.Typer(help="The route that agents' calls take.", no_args_is_help=True)


@app.command()
def replace(
    version: Version,
    reason: Annotated[str, typer.Option(help="Kept in the route's history.")] = "deploy replace",
    json: Json = False,
) -> None:
    """Send every agent to one policy, without a dropped request."""
    show_values(asyncio.run(with_store(lambda store: route_to(store, version, reason))), json)


@app.command()
def status(json: Json = False) -> None:
    """The route in force and the gateways that serve it; exit code 1 while one lags behind."""
    found = asyncio.run(with_store(_status))
    show_values(found, json)
    raise typer.Exit(0 if found["settled"] else 1)


async def _status(store: "Store") -> dict[str, Any]:
    from babylon.store.gateways import live_gateways
    from babylon.store.routes import current_route

    route = await current_route(store)
    gateways = await live_gateways(store)
    return {
        **asdict(route),
        "gateways": [asdict(gateway) for gateway in gateways],
        "settled": all(g.route_version >= route.route_version for g in gateways),
    }
