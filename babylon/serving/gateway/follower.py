"""Follows the routes in the database: each is served as soon as its policies are loaded.

Postgres notifies of changes, and a poll every few seconds covers lost notifications. Between a
notification and the swap lies a single query, because until the swap a policy that was rolled back
still answers. While the database is down, the last route stays in force.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import NoReturn

from babylon.core.errors import ModelError
from babylon.core.probes import identity_proof
from babylon.serving.gateway.auth import KeyRing
from babylon.serving.gateway.last_known import LastKnown, LastKnownFile
from babylon.serving.gateway.loader import POLL_S, RETRY_S, PolicyLoader, WantedPolicy
from babylon.serving.gateway.readiness import Event
from babylon.serving.gateway.recording import CallRecorder
from babylon.serving.gateway.route_table import RouteTable, Target, next_route, wanted
from babylon.store import Store
from babylon.store.calls import ARE_CALLS_RECORDED
from babylon.store.connection import UNREACHABLE, Remembered
from babylon.store.gateways import Desired, GatewayRow, announce_gateway, desired, remove_gateway
from babylon.store.policies import checkpoint_uris
from babylon.store.quarantine import end_quarantine
from babylon.store.routes import CHANNEL

log = logging.getLogger(__name__)


class RouteFollower:
    """Keeps a ``RouteTable`` at the newest route in the database while ``run`` runs."""

    def __init__(
        self,
        store: Store,
        loader: PolicyLoader,
        table: RouteTable,
        keys: KeyRing,
        recorder: CallRecorder,
        *,
        alias: str,
        gateway: str,
        url: str,
        probe_key: str,
        last_known: LastKnownFile | None,
    ) -> None:
        self._store, self._loader, self._table = store, loader, table
        self._keys, self._recorder = keys, recorder
        self._alias, self._gateway, self._url = alias, gateway, url
        self._probe_key, self._last_known = probe_key, last_known
        self._outage: str | None = None
        self._desired: Desired | None = None
        self._targets: Sequence[Target] = ()
        self._proposals_read = 0
        self._announced_in_flight: dict[str, int] = {}
        self._changed, self._announce_now = asyncio.Event(), asyncio.Event()
        loader.changed = self._on_loaded
        table.idle = self._on_idle

    @property
    def problem(self) -> str | None:
        """Reason why the newest route is not in force, although an older one is served."""
        if self._outage or self._desired is None:
            return self._outage
        arms, refusals = self._desired.route.versions, self._loader.refusals
        return next((why for policy, why in refusals.items() if policy.version in arms), None)

    def proof(self, nonce: str) -> str:
        """Prove to a deployment that this gateway announced its address."""
        return identity_proof(self._probe_key, self._gateway, nonce)

    async def _restore(self) -> None:
        """Serve the last known route until the database answers."""
        known = await asyncio.to_thread(self._last_known.read) if self._last_known else None
        if known is None:
            return
        self._recorder.rules.set(known.rules)
        self._keys.set(known.keys)
        targets = {target.policy_version: target for target in known.targets}
        self._want(known.desired, targets)

    async def run(self) -> NoReturn:
        while True:
            try:
                async with self._listening() as listening:
                    await self._renew_keys()
                    while listening():
                        await self._follow()
                        await self._renew_keys()
                        await self._remember()
                        await self._wait_for_change()
            except UNREACHABLE as error:
                self._note_outage(error)
                if self._desired is None:
                    await self._restore()
                await asyncio.sleep(RETRY_S)

    async def _renew_keys(self) -> None:
        await self._recorder.rules.renew(self._store)  # first: a new key's rule holds at once
        await self._keys.renew(self._store)

    async def announce_repeatedly(self) -> NoReturn:
        """Write this gateway's state to the database after each change and every ``POLL_S``."""
        while True:
            self._announce_now.clear()
            with suppress(*UNREACHABLE):  # ``run`` reports them
                await self._announce()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._announce_now.wait()

    async def leave(self, stored: bool) -> None:
        """Remove this gateway from the database, so that no deployment waits for it.

        ``stored``: all its calls are. Else collection waits for them, as for a killed gateway's.
        """
        with suppress(*UNREACHABLE):  # without announcements its row expires
            if stored:
                await remove_gateway(self._store, self._gateway)

    def _note_outage(self, error: Exception) -> None:
        problem = f"the database does not respond ({str(error) or type(error).__name__})"
        if self._table.route is None:
            self._table.readiness.note(Event.NO_DATABASE, problem)
        elif self._outage is None:
            log.warning("%s: route %d stays in force", problem, self._table.route.route_version)
        self._outage = problem

    async def _follow(self) -> None:
        try:
            newest = await desired(self._store)
        except ModelError as error:
            self._table.readiness.note(Event.NO_ROUTE, str(error))
            return
        self._outage = None
        versions, targets = wanted(newest), dict(self._loader.loaded)
        if unknown := versions.keys() - targets.keys():
            for version, uri in (await checkpoint_uris(self._store, unknown)).items():
                name = f"{self._alias}-v{version}"
                # An engine on another machine has another home, and finds the files by reference.
                home = self._store.home
                targets[version] = Target(name, version, home.reference(uri) if home.store else uri)
        self._proposals_read = max(self._proposals_read, *newest.proposals.values(), 0)
        self._targets = [targets[version] for version in versions]
        self._want(newest, targets)

    async def _remember(self) -> None:
        """Keep what is in force on the disk: a key that was just revoked is not in it."""
        if self._last_known and self._desired:
            known = LastKnown(
                place=self._last_known.place,
                store=Remembered.of(self._store),
                desired=self._desired,
                targets=self._targets,
                keys=self._keys.stored,
                rules=self._recorder.rules.in_force,
            )
            await asyncio.to_thread(self._last_known.write, known)

    def _want(self, newest: Desired, targets: Mapping[int, Target]) -> None:
        self._desired = newest
        self._loader.set_wanted(
            [WantedPolicy(targets[version], why) for version, why in wanted(newest).items()]
        )
        self._put_newest_in_force()

    def _on_loaded(self) -> None:
        self._put_newest_in_force()
        self._announce_now.set()

    def _put_newest_in_force(self) -> None:
        if self._desired is None:
            return
        before = self._table.route
        route = next_route(self._alias, self._desired, self._loader.loaded, before)
        if route == before:
            return
        self._table.route = route
        self._announce_now.set()
        if route and (before is None or before.route_version != route.route_version):
            arms = " and ".join(arm.name for arm in route.arms)
            log.info("route %d: %s serves", route.route_version, arms)

    async def _announce(self) -> None:
        route = self._table.route
        if route is None:
            return
        # By the database's clock, and read before the recorder: a call in between is not counted.
        now: datetime = await self._store.pool.fetchval("SELECT clock_timestamp()")
        behind = self._recorder.behind
        self._announced_in_flight = {str(v): self._table.routed[v] for v in self._table.in_flight}
        await announce_gateway(
            self._store,
            GatewayRow(
                gateway_id=self._gateway,
                url=self._url,
                route_version=route.route_version,
                loaded=sorted({target.policy_version for target in route.targets.values()}),
                refusals={str(p.version): why for p, why in self._loader.refusals.items()},
                in_flight=self._announced_in_flight,
                proposals_read=self._proposals_read,
                problem=self._table.readiness.unavailable or self.problem,
                recorded_until=None if behind is None else now - behind,
            ),
            self._probe_key,  # each time: another gateway may have removed the row, and it
        )
        await end_quarantine(self._store, self._gateway)

    def _on_idle(self, version: int) -> None:
        """Announce at once that a version's last call has ended: a deployment may wait for it."""
        if str(version) in self._announced_in_flight:
            self._announce_now.set()

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[Callable[[], bool]]:
        """Listen for notifications; the value tells if the connection is still open."""
        lost = asyncio.Event()

        # The pool takes a lost connection back, and then it cannot be asked.
        def note(_: object) -> None:
            lost.set()
            self._changed.set()

        async with self._store.pool.acquire() as connection:
            await connection.add_listener(CHANNEL, self._on_notification)
            connection.add_termination_listener(note)
            try:
                yield lambda: not lost.is_set()
            finally:
                if not lost.is_set():
                    connection.remove_termination_listener(note)
                    with suppress(*UNREACHABLE):  # an error here would hide that the gateway stops
                        await connection.remove_listener(CHANNEL, self._on_notification)

    def _on_notification(self, *message: object) -> None:
        (self._announce_now if message[-1] == ARE_CALLS_RECORDED else self._changed).set()

    async def _wait_for_change(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S if self._table.readiness.unavailable else POLL_S):
                await self._changed.wait()
        self._changed.clear()
