"""A change of the route, in two phases.

First phase: propose the policy, wait until the gateways have loaded it, check it. A refusal here
leaves everything as it was. Second phase: commit one row, if the route is still the one that was
decided on, and wait until the gateways serve it. If fewer than half do, the route before is put in
force again. Late gateways are quarantined (``store/gateways.py``). A worker that dies in between
leaves a proposal, which expires, or a route, which the resumed run waits for.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from babylon.core.errors import CheckpointRefusedError, RouteConflictError, ServingError
from babylon.core.settings import Settings
from babylon.core.types import Change, Claim
from babylon.deployment.checks.check_result import Checked
from babylon.store.connection import Store
from babylon.store.gateways import (
    LOAD_S,
    GatewayRow,
    gateway_runs,
    live_gateways,
    wait_for_acks,
    wait_until_drained,
    wait_until_loaded,
)
from babylon.store.policies import get_policy
from babylon.store.proposals import proposed
from babylon.store.routes import RESTORER, Route, Split, commit_route

log = logging.getLogger(__name__)
ACK_S = 120.0  # long enough for an engine that restarts at this moment
DRAIN_S = 30.0  # streams may take minutes; the policy stays loaded for them
FORCED = "; its checks were skipped by hand"  # at the end of a reason

# Store, new policy, champion, gateways → result.
RunChecks = Callable[[Store, int, int, Sequence[GatewayRow]], Awaitable[Checked]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRequest:
    """The author of a change of the route, and the reason.

    ``force`` skips the checks; the route's reason says so. ``claim``: the claim of the window whose
    worker asks. ``route``: the route that the decision is about, by default the current one.
    ``drain_s``: time to wait for calls to policies that serve no longer.
    """

    author: str
    reason: str
    force: bool = False
    claim: Claim | None = None
    route: Route | None = None
    drain_s: float = DRAIN_S


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRoute:
    """The route to put in force. ``new``: the policy that gateways must load first, if any."""

    policy_version: int
    split: Split | None = None
    new: int | None = None

    @property
    def versions(self) -> set[int]:
        """The policies that serve under this route."""
        challenger = () if self.split is None else (self.split.challenger_version,)
        return {self.policy_version, *challenger}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """The first phase, as fields of ``Change``."""

    checks: dict[str, Any] | None = None
    prepare_s: float = 0.0
    check_s: float = 0.0


async def change_route(
    store: Store,
    before: Route,
    target: TargetRoute,
    request: ChangeRequest,
    run_checks: RunChecks | None,
) -> Change:
    """Put ``target`` in force in place of ``before``, and wait until the live gateways serve it.

    ``run_checks``: the checks of a new policy; ``None`` for one that passed them before.

    Raises:
        ModelError: There is no such policy, or its checkpoint was removed.
        CheckpointRefusedError: The policy did not pass the checks; nothing was changed.
        RouteConflictError: The route changed meanwhile; nothing was changed.
        FencedError: The claim is stale; nothing was changed.
        SupersededError: A window sends out a policy whose parent is not the champion; nothing was
            changed.
        ServingError: Fewer than half of the gateways load the policy, and nothing was changed; or
            fewer serve the new route, and the route before is in force again.
    """
    async with _proposal(store, target, request):  # keeps the policy loaded until a route does
        prepared = await _prepare(store, before, target, None if request.force else run_checks)
        reason = request.reason + FORCED * request.force
        version = await commit_route(
            store,
            policy_version=target.policy_version,
            author=request.author,
            reason=reason,
            expected_route_version=before.route_version,
            split=target.split,
            claim=request.claim,
            candidate=target.new if request.claim and run_checks else None,  # or it served before
        )
    committed = time.monotonic()
    must_serve = target.policy_version if target.new is None else target.new
    acknowledged_by = await wait_or_roll_back(store, version, must_serve, before)
    served = time.monotonic()
    unfinished = await _drained(store, before.versions - target.versions, request.drain_s)
    return Change(
        route_version=version,
        policy_version=target.policy_version,
        **({} if target.split is None else asdict(target.split)),
        reason=reason,
        acknowledged_by=acknowledged_by,
        **asdict(prepared),
        commit_s=served - committed,
        drain_s=time.monotonic() - served,
        unfinished=unfinished,
    )


async def wait_or_roll_back(
    store: Store, route_version: int, policy_version: int, fallback: Route
) -> tuple[str, ...]:
    """Wait until the live gateways serve a route, and return the ids of those that do.

    Raises:
        ServingError: Fewer than half of them serve the route in time. ``fallback`` is in force
            again.
    """
    try:
        return await wait_for_acks(store, route_version, policy_version, ACK_S)
    except ServingError as error:
        log.error("route %d is rolled back: %s", route_version, error)
        try:
            await commit_route(
                store,
                policy_version=fallback.policy_version,
                author=RESTORER,
                reason=f"route {route_version} was not acknowledged",
                expected_route_version=route_version,
                split=fallback.split,
            )
        except RouteConflictError as conflict:  # a newer route is in force: keep it
            log.error("route %d was replaced meanwhile: %s", route_version, conflict)
        raise


async def wait_until_served(store: Store, route: Route) -> Change:
    """Wait until the live gateways serve a route that is in force. It was committed before.

    Raises:
        ServingError: Fewer than half of them do.
    """
    acknowledged_by = await wait_for_acks(store, route.route_version, route.policy_version, ACK_S)
    return Change(
        route_version=route.route_version,
        policy_version=route.policy_version,
        **({} if route.split is None else asdict(route.split)),
        reason=route.reason,
        acknowledged_by=acknowledged_by,
    )


async def version_to_load(store: Store, policy_version: int) -> int | None:
    """The policy, if a gateway must load it before it can serve; ``None`` if all have it."""
    gateways = await live_gateways(store)
    warm = all(policy_version in gateway.loaded for gateway in gateways)
    return None if warm else policy_version


def checks_under(settings: Settings) -> RunChecks:
    """The checks of ``babylon.deployment.checks``, imported in a thread when they first run.

    The import takes a second, for which a rollback must not wait.
    """

    def load() -> Callable[..., Awaitable[Checked]]:
        from babylon.deployment.checks.check_policy import check_policy

        return check_policy

    async def run(store: Store, new: int, champion: int, gateways: Sequence[GatewayRow]) -> Checked:
        check_policy = await asyncio.to_thread(load)
        policies = await get_policy(store, new), await get_policy(store, champion)
        return await check_policy(store, settings, *policies, gateways)

    return run


def _proposal(
    store: Store, target: TargetRoute, request: ChangeRequest
) -> AbstractAsyncContextManager[object]:
    if target.new is None:
        return nullcontext()
    return proposed(store, target.new, request.author)


async def _prepare(
    store: Store, before: Route, target: TargetRoute, run_checks: RunChecks | None
) -> _Prepared:
    if target.new is None:
        return _Prepared()
    started = time.monotonic()
    runs = run_checks is not None and await gateway_runs(store)
    gateways = await wait_until_loaded(store, target.new, LOAD_S)
    loaded = time.monotonic()
    if runs and not gateways:  # they will follow the route once they are back
        raise ServingError(
            f"all gateways stopped before policy {target.new} was checked: start one"
        )
    if not gateways or run_checks is None:
        return _Prepared(prepare_s=loaded - started)
    checked = await run_checks(store, target.new, before.policy_version, gateways)
    if not checked.passed:
        raise CheckpointRefusedError(
            f"policy {target.new} is refused: {checked.reason}; policy {before.policy_version}"
            " keeps serving",
            checked.as_json(),
        )
    return _Prepared(
        checks=checked.as_json(), prepare_s=loaded - started, check_s=time.monotonic() - loaded
    )


async def _drained(store: Store, versions: frozenset[int], drain_s: float) -> int:
    """Wait for the calls of policies that serve no longer. Return the number that are left."""
    deadline = time.monotonic() + drain_s
    left = 0
    for version in versions:
        left += await wait_until_drained(store, version, deadline - time.monotonic())
    return left
