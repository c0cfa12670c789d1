"""Following ``babylon.routes``: load the new policy, swap, announce, drain and unload the old.

Postgres notifies; a poll every few seconds makes up for a notification that was lost and
repairs what changed outside (an engine that was restarted has lost its policies). While the
database is away the last route stays in force.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import NoReturn

from babylon.errors import ModelError, ServingError
from babylon.gateway.auth import KeyRing
from babylon.gateway.engine import Engine, EngineDownError
from babylon.gateway.recording import CallRecorder
from babylon.gateway.routes import Route, RouteTable, Target
from babylon.gateway.shipping import DATABASE_FAILURES
from babylon.store import Store
from babylon.store.gateways import Gateway, announce_gateway, live_gateways, remove_gateway
from babylon.store.policies import Policy, champion
from babylon.store.routes import CHANNEL

log = logging.getLogger(__name__)

POLL_S = 2.0
RETRY_S = 0.25  # while something is wrong


class Follower:
    """Keeps a ``RouteTable`` at the newest route while ``run`` runs.

    ``problem`` is what stands in the way of the newest route, although an older one is served;
    it is announced too, so that whoever waits for this gateway knows.
    """

    def __init__(
        self,
        store: Store,
        engine: Engine,
        table: RouteTable,
        keys: KeyRing,
        recorder: CallRecorder,
        *,
        alias: str,
        gateway: str,
        url: str,
    ) -> None:
        self.problem: str | None = None
        self._refusals: dict[str, str] = {}
        self.no_policy = False
        self._store, self._engine, self._table = store, engine, table
        self._keys, self._recorder = keys, recorder
        self._alias, self._gateway, self._url = alias, gateway, url
        self._ours = re.compile(rf"{re.escape(alias)}-v\d+")
        self._changed = asyncio.Event()
        self._announcing = asyncio.Lock()

    async def run(self) -> NoReturn:
        while True:
            try:
                async with self._listening() as listening:
                    while listening():
                        await self._step()
                        await self._pause()
            except DATABASE_FAILURES as error:
                await self._without_database(error)
                await asyncio.sleep(RETRY_S)

    async def give_signs_of_life(self) -> NoReturn:
        """Announce this gateway again and again, also while a large policy loads."""
        while True:
            with suppress(*DATABASE_FAILURES):  # ``run`` reports them
                await self._announce()
            await asyncio.sleep(POLL_S)

    def suspect(self, reason: str) -> None:
        """A request failed for this reason: serve nothing until a look says that all is well."""
        self._report(reason)
        self._changed.set()

    async def leave(self) -> None:
        """Tell those who wait for acknowledgements that this gateway is gone."""
        with suppress(*DATABASE_FAILURES):  # they will notice by its silence
            await remove_gateway(self._store, self._gateway)

    async def _without_database(self, error: Exception) -> None:
        """The last route stays in force, and the engine is looked after as always."""
        problem = f"the database does not answer ({error or type(error).__name__})"
        route = self._table.route
        if route is None:
            self._report(problem)
            return
        if self.problem is None:
            log.warning("%s: route %d stays in force", problem, route.route_version)
        self.problem = problem
        try:
            self._table.route = await self._hold(route, set(await self._engine.policies()))
            self._available()
        except ServingError as failed:
            self._report(str(failed))

    async def _step(self) -> None:
        await self._keys.renew(self._store)
        try:
            policy, route_version = await champion(self._store)
            self.no_policy = False
            held = set(await self._engine.policies())
            await self._serve(policy, route_version, held)
            await self._announce()
            await self._unload_old(held)
        except ModelError as error:
            self.no_policy = True
            self._report(str(error))
        except ServingError as error:
            self._engine_failed(error, policy)
            await self._announce()

    async def _serve(self, policy: Policy, route_version: int, held: set[str]) -> None:
        """Have the engine hold what the route needs, then swap. ``held``: what it holds."""
        if self._table.route:  # first what serves now, should the engine have lost it
            self._table.route = await self._hold(self._table.route, held)
            self._available()
        route = self._next_route(policy, route_version)
        if route != self._table.route:
            self._table.route = await self._hold(route, held)
            log.info("route %d: %s serves", route_version, route.current.name)
        self.problem, self._refusals = None, {}
        self._available()

    def _next_route(self, policy: Policy, route_version: int) -> Route:
        version = policy.policy_version
        target = Target(f"{self._alias}-v{version}", version, policy.uri.removeprefix("file://"))
        route = self._table.route
        if route is None:
            return Route(route_version, self._alias, target)
        if route.route_version == route_version:
            return route
        return route.successor(route_version, target)

    async def _hold(self, route: Route, held: set[str]) -> Route:
        """Load what the engine does not hold; without ``previous`` when that loads no more."""
        if route.current.name not in held:
            await self._engine.load(route.current)
            held.add(route.current.name)
        if route.previous and route.previous.name not in held:
            try:
                await self._engine.load(route.previous)
            except EngineDownError:
                raise
            except ServingError as error:
                log.warning("no warm policy to roll back to: %s", error)
                return replace(route, previous=None)
            held.add(route.previous.name)
        return route

    async def _unload_old(self, held: set[str]) -> None:
        """Unload versions that no gateway routes to and no request of this one uses."""
        route = self._table.route
        assert route is not None  # _serve came first
        old = [
            name
            for name in held
            if self._ours.fullmatch(name)
            and name not in route.targets
            and not self._table.in_flight[name]
        ]
        if old and all(
            gateway.route_version >= route.route_version
            for gateway in await live_gateways(self._store)
        ):
            for name in old:
                await self._engine.unload(name)

    async def _announce(self) -> None:
        async with self._announcing:  # one after the other: an older route never comes last
            if route := self._table.route:
                await announce_gateway(
                    self._store,
                    Gateway(
                        gateway_id=self._gateway,
                        url=self._url,
                        route_version=route.route_version,
                        refusals=self._refusals,
                        problem=self.problem,
                        recorded_until=self._recorder.recorded_until,
                    ),
                )

    def _engine_failed(self, error: ServingError, policy: Policy) -> None:
        """An engine that is down stops serving; one that refuses the new policy keeps the old."""
        if isinstance(error, EngineDownError) or self._table.route is None:
            self._report(str(error))
        elif self._refusals.get(str(policy.policy_version)) != str(error):
            self.problem = str(error)
            self._refusals = {str(policy.policy_version): self.problem}
            log.error("the newest route is not served: %s", error)

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[Callable[[], bool]]:
        """Hear of new routes while the block runs; the value is true while the connection lives."""
        async with self._store.pool.acquire() as connection:
            await connection.add_listener(CHANNEL, self._heard)
            connection.add_termination_listener(self._heard)
            try:
                yield lambda: not connection.is_closed()
            finally:
                if not connection.is_closed():
                    connection.remove_termination_listener(self._heard)
                    await connection.remove_listener(CHANNEL, self._heard)

    def _heard(self, *_: object) -> None:
        self._changed.set()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(RETRY_S if self._table.unavailable else POLL_S):
                await self._changed.wait()
        except TimeoutError:
            return
        finally:
            self._changed.clear()

    def _report(self, reason: str) -> None:
        if self._table.unavailable != reason:
            self._table.unavailable = reason
            log.warning("not serving: %s", reason)

    def _available(self) -> None:
        if self._table.unavailable:
            log.info("serving")
            self._table.unavailable = None
