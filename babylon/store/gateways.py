"""The state that each gateway announces every few seconds, and the state that all should have."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta

from babylon.core.errors import ModelError, ServingError
from babylon.core.failpoints import failpoint
from babylon.store.connection import Connection, Pool, Store
from babylon.store.policies import NO_POLICY, lock_routes
from babylon.store.quarantine import quarantine, quarantined
from babylon.store.routes import Route

log = logging.getLogger(__name__)
LIVE_S = 10.0  # a gateway that was silent for this time counts as gone
FOLLOW_S = 10.0  # for the other gateways, once half of them have followed
SILENT_S = 300.0  # a stalled database or host may silence gateways that serve for so long
LOAD_S = 630.0  # a gateway gives its engine 600 s to load a policy
_POLL_S = 0.02
_HALTED_S = 10.0  # a gateway that halts while it holds the lock loses it after this time


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRow:
    """A running gateway.

    Attributes:
        loaded: the policy versions that it can serve at once.
        refusals: policy version → why it cannot load that policy.
        in_flight: each version that answers calls now → its calls that a route sent there. Calls
            that ask for the version by name do not count, so the number may be 0.
        proposals_read: the newest proposal that it knew when it wrote this row.
        recorded_until: every call that it answered before this time, by the database's clock, is
            in ``babylon.calls``.
        quarantined: why deployments do not wait for it; the gateway itself does not write it.
    """

    gateway_id: str
    url: str
    route_version: int
    loaded: Sequence[int] = ()
    refusals: dict[str, str] = field(default_factory=dict)
    in_flight: dict[str, int] = field(default_factory=dict)
    proposals_read: int | None = None
    problem: str | None = None
    seen_at: datetime | None = None
    recorded_until: datetime | None = None
    quarantined: str | None = None

    def refusal(self, policy_version: int | None) -> str | None:
        """Return why the gateway cannot load a policy, ``None`` if it does not refuse it."""
        return self.refusals.get(str(policy_version))

    def __str__(self) -> str:
        return f"{self.gateway_id} at {self.url}"


async def announce_gateway(store: Store, gateway: GatewayRow, probe_key: str | None = None) -> None:
    """Insert or update a gateway's row, and the key with which a deployment's probes ask it.

    ``seen_at`` is by the database's clock. Both are written at once, so that no live gateway is
    without its key; another gateway may have removed the row, and the key with it.
    """
    row = asdict(gateway)
    del row["seen_at"], row["quarantined"]
    await store.pool.execute(
        f"WITH announced AS (INSERT INTO babylon.gateways ({', '.join(row)})"
        f" VALUES ({', '.join(f'${i + 2}' for i in range(len(row)))})"
        " ON CONFLICT (gateway_id) DO UPDATE SET seen_at = now(), "
        + ", ".join(f"{name} = excluded.{name}" for name in row)
        + " RETURNING gateway_id) INSERT INTO babylon.gateway_probes (gateway_id, probe_key)"
        " SELECT gateway_id, $1 FROM announced WHERE $1::text IS NOT NULL"
        " ON CONFLICT (gateway_id) DO UPDATE SET probe_key = excluded.probe_key"
        " WHERE gateway_probes.probe_key <> excluded.probe_key",
        probe_key,
        *row.values(),
    )


async def remove_gateway(store: Store, gateway_id: str) -> None:
    """Delete the row of a gateway that stops, so that nobody waits for it."""
    await store.pool.execute("DELETE FROM babylon.gateways WHERE gateway_id = $1", gateway_id)


async def remove_old_gateways(store: Store) -> None:
    """Delete the rows of gateways that ended without a goodbye more than a day ago."""
    await store.pool.execute(
        "DELETE FROM babylon.gateways WHERE seen_at < now() - interval '1 day'"
    )


async def live_gateways(store: Store, within_s: float = LIVE_S) -> list[GatewayRow]:
    """Return the gateways that announced themselves in the last ``within_s`` seconds."""
    rows = await store.pool.fetch(
        "SELECT g.*, q.reason AS quarantined FROM babylon.gateways g"
        " LEFT JOIN babylon.quarantine q USING (gateway_id)"
        " WHERE seen_at > now() - $1::interval ORDER BY gateway_id",
        timedelta(seconds=within_s),
    )
    return [GatewayRow(**row) for row in rows]


async def gateway_runs(store: Store) -> bool:
    """Return True if a gateway is live. Those that fell silent and did not stop are waited for.

    Raises:
        ServingError: they stayed silent for ``SILENT_S``, or stopped meanwhile.
    """
    silent: list[GatewayRow] = []
    while not await live_gateways(store):
        found = await live_gateways(store, SILENT_S)
        if not found and silent:
            raise ServingError(
                f"no gateway answers, and these served before: {', '.join(map(str, silent))};"
                " start one"
            )
        if not found:
            return False
        silent = found
        await asyncio.sleep(_POLL_S)
    return True


async def wait_until_loaded(
    store: Store, policy_version: int, timeout_s: float
) -> tuple[GatewayRow, ...]:
    """Wait until the live gateways have loaded a proposed policy; return those that have.

    A refusal from before the gateway read the proposal does not count: it will try again.

    Raises:
        ServingError: fewer than half of the gateways can load the policy, or have after the
            timeout.
    """
    proposal: int = await store.pool.fetchval(
        "SELECT coalesce(max(proposal_id), 0) FROM babylon.proposals WHERE policy_version = $1",
        policy_version,
    )

    def refusal(gateway: GatewayRow) -> str | None:
        read = gateway.proposals_read
        return None if read is not None and read < proposal else gateway.refusal(policy_version)

    return await _wait_for_quorum(
        store,
        lambda gateway: policy_version in gateway.loaded,
        refusal,
        f"hold policy {policy_version}",
        timeout_s,
    )


async def wait_for_acks(
    store: Store, route_version: int, policy_version: int, timeout_s: float
) -> tuple[str, ...]:
    """Wait until the live gateways serve this route or a newer one; return the ids of those.

    Raises:
        ServingError: fewer than half of the gateways can load the route's policy (raised at once),
            or serve the route after the timeout.
    """
    gateways = await _wait_for_quorum(
        store,
        lambda gateway: gateway.route_version >= route_version,
        lambda gateway: gateway.refusal(policy_version),
        f"serve route {route_version}",
        timeout_s,
    )
    failpoint("route.acknowledged")
    return tuple(gateway.gateway_id for gateway in gateways)


async def wait_until_drained(store: Store, policy_version: int, timeout_s: float) -> int:
    """Wait until no call that a route sent to the policy is being answered.

    Calls that ask for the policy by name do not count, because they may go on for ever.

    Returns:
        The number of calls that are left after the timeout.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        gateways = await live_gateways(store)
        left = sum(gateway.in_flight.get(str(policy_version), 0) for gateway in gateways)
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(_POLL_S)


async def _wait_for_quorum(
    store: Store,
    done: Callable[[GatewayRow], bool],
    refusal: Callable[[GatewayRow], str | None],
    what: str,
    timeout_s: float,
) -> tuple[GatewayRow, ...]:
    """Wait for all gateways. Once half of them are done, wait only ``FOLLOW_S`` more.

    Gateways that are late then are quarantined: one frozen machine must not stop the fleet. They
    serve the route before until they follow by themselves.
    """
    deadline, half_at = time.monotonic() + timeout_s, None
    while True:
        gateways, known = await live_gateways(store), await quarantined(store)
        ready = tuple(gateway for gateway in gateways if done(gateway))
        late = [one for one in gateways if not done(one) and one.gateway_id not in known]
        half = len(ready) * 2 >= len(gateways)  # of all: the quarantined count too
        if not late and half:
            return ready
        # A refusal can pass, such as that of a full disk, but nobody waits for it.
        refused = {one.gateway_id: why for one in late if (why := refusal(one))}
        half_at = (half_at or time.monotonic()) if half else None
        if half_at and (len(refused) == len(late) or time.monotonic() > half_at + FOLLOW_S):
            return await _without(store, ready, late, refused, what)
        if refused and len(refused) * 2 > len(gateways):
            gateway = next(one for one in late if one.gateway_id in refused)
            raise ServingError(f"{gateway} cannot {what}: {refused[gateway.gateway_id]}")
        if time.monotonic() > deadline:
            late = [gateway for gateway in gateways if not done(gateway)]
            names = ", ".join(f"{gateway} (route {gateway.route_version})" for gateway in late)
            raise ServingError(
                f"fewer than half of the gateways could {what} within {timeout_s:.0f} s: {names};"
                " look at their logs or restart them"
            )
        await asyncio.sleep(_POLL_S)


async def _without(
    store: Store,
    ready: tuple[GatewayRow, ...],
    late: Sequence[GatewayRow],
    refused: Mapping[str, str],
    what: str,
) -> tuple[GatewayRow, ...]:
    """Quarantine the late gateways; return the others."""
    reasons = {
        one.gateway_id: f"it did not {what}: {refused.get(one.gateway_id, 'no answer in time')}"
        for one in late
    }
    await quarantine(store, reasons)
    for gateway in late:
        log.warning("%s is not waited for: %s", gateway, reasons[gateway.gateway_id])
    return ready


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
