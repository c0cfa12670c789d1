"""Policies to deploy, and a gateway as far as Postgres sees one: what it says of itself."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from babylon.core.types import Claim, Verdict
from babylon.core.windows import parse_window_id
from babylon.store import Store
from babylon.store.gateways import GatewayRow, announce_gateway, live_gateways, remove_gateway
from babylon.store.policies import champion, commit_policy, ensure_base
from babylon.store.proposals import open_proposals
from babylon.store.routes import current_route
from babylon.store.windows import claim_window


async def commit(store: Store, claim: Claim, *, parent_version: int, name: str) -> int:
    """A policy that nobody can load."""
    return await commit_policy(
        store,
        claim,
        parent_version=parent_version,
        kind="lora",
        uri=f"/nowhere/{name}",
        base_model="tiny",
        batch_id=f"window-{claim.window_id}",
        trajectory_ids=[name],
        metrics={},
    )


async def commit_under(store: Store, claim: Claim, parent_version: int, **fields: Any) -> int:
    """A policy of any parent, as if that one had led at the commit."""
    leading = await serving(store)
    version = await commit_policy(store, claim, parent_version=leading, **fields)
    await store.pool.execute(
        "UPDATE babylon.policies SET parent_version = $2 WHERE policy_version = $1",
        version,
        parent_version,
    )
    return version


async def three_policies(store: Store) -> Claim:
    """Policies 0 (serving), 1 and 2, both of parent 0, and the claim that trained the last."""
    await ensure_base(store, uri="/nowhere/base", base_model="tiny")
    for version, hour in ((1, "09"), (2, "10")):
        window = parse_window_id(f"2025-11-14T{hour}:00")
        claim = await claim_window(store, window, owner="worker", lease_s=0.0)
        await commit(store, claim, parent_version=0, name=f"v{version}")
    return claim


def verdict(claim: Claim, *, promote: bool = True, route_version: int = 1) -> Verdict:
    """Of policy 2."""
    measured = (
        *("pnl_before", "pnl_after", "pnl_difference_low", "pnl_difference_high"),
        *("win_rate_before", "win_rate_after", "malformed_before", "malformed_after"),
        *("drawdown_before", "drawdown_after"),
    )
    return Verdict(
        claim=claim,
        policy_version=2,
        route_version=route_version,
        promote=promote,
        reason="test",
        scenarios=32,
        **dict.fromkeys(measured, 0.0),
    )


async def serving(store: Store) -> int:
    """The champion's version."""
    return (await champion(store))[0].policy_version


async def outcomes(store: Store) -> list[str | None]:
    """Return the outcome of every proposal, oldest first."""
    rows = await store.pool.fetch("SELECT outcome FROM babylon.proposals ORDER BY proposal_id")
    return [row["outcome"] for row in rows]


@asynccontextmanager
async def announced(
    store: Store,
    *,
    holds: Sequence[int] = (),
    refuses: Mapping[int, str] | None = None,
    until_route: int = 10_000,
) -> AsyncIterator[None]:
    """A gateway ``g1`` says that it does what is asked: it ``holds`` that and what is
    proposed or routed, but for what it ``refuses``, and takes every route up to ``until_route``."""
    refuses = refuses or {}

    async def tell() -> None:
        while True:
            route = await current_route(store)
            asked = {proposal.policy_version for proposal in await open_proposals(store)}
            gateway = GatewayRow(
                gateway_id="g1",
                url="http://one",
                route_version=min(route.route_version, until_route),
                loaded=sorted((asked | route.versions | set(holds)) - refuses.keys()),
                refusals={str(version): why for version, why in refuses.items()},
                recorded_until=datetime.now(UTC) + timedelta(hours=1),
            )
            await announce_gateway(store, gateway)
            await asyncio.sleep(0.01)

    telling = asyncio.create_task(tell())
    await until_announced(store)
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        await remove_gateway(store, "g1")  # as a gateway that ends


async def until_announced(store: Store) -> None:
    """A gateway answers its clients before Postgres knows of it."""
    async with asyncio.timeout(20):
        while not await live_gateways(store):
            await asyncio.sleep(0.01)
