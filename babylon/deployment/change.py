"""One change of the route, in two phases: nobody is served by a policy before every gateway holds
it and it has passed the checks, and nobody is left behind once it serves.

Propose, load, check: any refusal here leaves everything as it was. Then one row, committed only
if the route is still the one that was decided upon, and an acknowledgement of every gateway; when
one is missing, the route before is put in force again. A worker that is killed in between leaves a
proposal, which runs out by itself, or a route, which whoever resumes waits for.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from babylon.core.errors import CheckpointRefusedError, RouteConflictError, ServingError
from babylon.core.settings import Settings
from babylon.core.types import Change, Claim
from babylon.store.connection import Store
from babylon.store.gateways import (
    GatewayRow,
    live_gateways,
    wait_for_acks,
    wait_until_drained,
    wait_until_loaded,
)
from babylon.store.policies import Policy, get_policy
from babylon.store.proposals import proposed
from babylon.store.routes import RESTORER, Route, Split, commit_route

if TYPE_CHECKING:
    from babylon.deployment.checks.check_result import Checked

CheckPolicy = Callable[
    [Store, Settings, Policy, Policy, Sequence[GatewayRow]], Coroutine[Any, Any, "Checked"]
]

log = logging.getLogger(__name__)
LOAD_S = 630.0  # a gateway gives its engine 600 s to load a policy
ACK_S = 120.0  # for an assignment; and for an engine that was restarted just then
DRAIN_S = 30.0  # streams may take minutes; the policy stays loaded for them
FORCED = "; its checks were skipped by hand"  # at the end of a reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Who asks for a change of the route, and why.

    ``force``: without the checks, and the route's reason says so. ``claim``: of the window whose
    worker asks. ``route``: the one that the decision is about, if not that of just now.
    ``drain_s``: how long to wait for the calls that policies which serve no more still answer.
    """

    author: str
    reason: str
    force: bool = False
    claim: Claim | None = None
    route: Route | None = None
    drain_s: float = DRAIN_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be in force. ``new``: the policy that gateways load first and that has to pass
    the checks, unless ``check`` is off; ``None`` when all that is wanted is loaded."""

    policy_version: int
    split: Split | None = None
    new: int | None = None
    check: bool = True

    @property
    def versions(self) -> set[int]:
        """Policies that are to serve."""
        challenger = () if self.split is None else (self.split.challenger_version,)
        return {self.policy_version, *challenger}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """The first phase, in the words of ``Change``."""

    checks: dict[str, Any] | None = None
    prepare_s: float = 0.0
    check_s: float = 0.0


async def change_route(
    store: Store, settings: Settings, before: Route, wanted: Wanted, order: Order
) -> Change:
    """Put ``wanted`` in force in place of ``before``, and wait until every live gateway serves it.

    Raises:
        ModelError: there is no such policy, or its checkpoint was removed.
        CheckpointRefusedError: it did not pass; nothing was changed.
        RouteConflictError: somebody else changed the route meanwhile; nothing was changed.
        FencedError: the claim is stale; nothing was changed.
        ServingError: a gateway cannot load the policy, and nothing was changed; or it did not
            follow, and the route before is in force again.
    """
    async with _proposal(store, wanted, order):  # keeps the policy loaded until a route does
        prepared = await _prepare(store, settings, before, wanted, order)
        reason = order.reason + FORCED * order.force
        version = await _commit(store, before, wanted, order, reason)
    committed = time.monotonic()
    challenged = wanted.policy_version if wanted.new is None else wanted.new
    acknowledged_by = await follow(store, version, challenged, before)
    served = time.monotonic()
    unfinished = await _drained(store, before, wanted, order.drain_s)
    return Change(
        route_version=version,
        policy_version=wanted.policy_version,
        **({} if wanted.split is None else asdict(wanted.split)),
        reason=reason,
        acknowledged_by=acknowledged_by,
        **asdict(prepared),
        commit_s=served - committed,
        drain_s=time.monotonic() - served,
        unfinished=unfinished,
    )


async def follow(
    store: Store, route_version: int, policy_version: int, fallback: Route
) -> tuple[str, ...]:
    """Wait until every live gateway serves a route; returns their ids.

    Raises:
        ServingError: one cannot serve the policy, or does not follow; ``fallback`` is in force
            again.
    """
    try:
        return await wait_for_acks(store, route_version, policy_version, ACK_S)
    except ServingError as error:
        log.error("route %d is taken back: %s", route_version, error)
        try:
            await commit_route(
                store,
                policy_version=fallback.policy_version,
                author=RESTORER,
                reason=f"route {route_version} was not acknowledged",
                expected_route_version=route_version,
                split=fallback.split,
            )
        except RouteConflictError as conflict:  # somebody was quicker, and knows more
            log.error("it was not needed: %s", conflict)
        raise


async def awaited(store: Store, route: Route) -> Change:
    """The change that was asked for was made before: wait until every live gateway serves it.

    Raises:
        ServingError: one does not.
    """
    acknowledged_by = await wait_for_acks(store, route.route_version, route.policy_version, ACK_S)
    return Change(
        route_version=route.route_version,
        policy_version=route.policy_version,
        **({} if route.split is None else asdict(route.split)),
        reason=route.reason,
        acknowledged_by=acknowledged_by,
    )


async def unless_loaded(store: Store, policy_version: int) -> int | None:
    """The policy, if gateways have to load it before it can serve; ``None`` if it is warm."""
    gateways = await live_gateways(store)
    warm = all(policy_version in gateway.loaded for gateway in gateways)
    return None if warm else policy_version


def _proposal(store: Store, wanted: Wanted, order: Order) -> AbstractAsyncContextManager[object]:
    if wanted.new is None:
        return nullcontext()
    return proposed(store, wanted.new, order.author)


async def _prepare(
    store: Store, settings: Settings, before: Route, wanted: Wanted, order: Order
) -> _Prepared:
    if wanted.new is None:
        return _Prepared()
    started = time.monotonic()
    gateways = await wait_until_loaded(store, wanted.new, LOAD_S)
    loaded = time.monotonic()
    if not gateways or not wanted.check or order.force:
        return _Prepared(prepare_s=loaded - started)
    checked = await _checked(store, settings, before, wanted.new, gateways)
    return _Prepared(
        checks=checked.as_json(), prepare_s=loaded - started, check_s=time.monotonic() - loaded
    )


async def _checked(
    store: Store, settings: Settings, before: Route, new: int, gateways: Sequence[GatewayRow]
) -> "Checked":
    check_policy = await asyncio.to_thread(_check_policy)
    policy, champion = await get_policy(store, new), await get_policy(store, before.policy_version)
    checked = await check_policy(store, settings, policy, champion, gateways)
    if not checked.passed:
        raise CheckpointRefusedError(
            f"policy {new} is refused: {checked.reason}; policy {before.policy_version} keeps"
            " serving",
            checked.as_json(),
        )
    return checked


def _check_policy() -> CheckPolicy:
    """Imported here because it takes a second, for which a rollback must not wait."""
    from babylon.deployment.checks.check_policy import check_policy

    return check_policy


async def _commit(store: Store, before: Route, wanted: Wanted, order: Order, reason: str) -> int:
    return await commit_route(
        store,
        policy_version=wanted.policy_version,
        author=order.author,
        reason=reason,
        expected_route_version=before.route_version,
        split=wanted.split,
        claim=order.claim,
    )


async def _drained(store: Store, before: Route, wanted: Wanted, drain_s: float) -> int:
    """Wait for the calls of the policies that serve no more; returns how many are left."""
    deadline = time.monotonic() + drain_s
    left = 0
    for version in before.versions - wanted.versions:
        left += await wait_until_drained(store, version, deadline - time.monotonic())
    return left
