"""Loads the wanted policies into the engine, one after the other, the most urgent first.

This loop is separate from the one that follows routes: a load may take minutes, and a route to
loaded policies must not wait for it. A restarted engine has lost its policies. They are loaded
again before calls go there.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from babylon.core.errors import ServingError
from babylon.serving.gateway.engine_client import EngineDownError
from babylon.serving.gateway.engine_pool import EnginePool
from babylon.serving.gateway.readiness import Event, State
from babylon.serving.gateway.route_table import Occasion, RouteTable, Target, wanted
from babylon.store import Store
from babylon.store.connection import UNREACHABLE
from babylon.store.gateways import lock_desired

log = logging.getLogger(__name__)

POLL_S = 2.0
RETRY_S = 0.25  # while nothing can be served


@dataclass(frozen=True, slots=True)
class WantedPolicy:
    """A policy to load. A refused load is not tried again for the same ``occasion``; without an
    occasion, it is retried."""

    target: Target
    occasion: Occasion = None

    @property
    def version(self) -> int:
        return self.target.policy_version


class PolicyLoader:
    """Keeps the engine's policies as wanted while ``run`` runs.

    ``loaded``: the wanted policies that the engine holds, by version; only these are served.
    ``refusals``: policies that the engine refused, and its reasons. ``changed`` is called after a
    change of either.
    """

    def __init__(self, store: Store, engine: EnginePool, table: RouteTable, alias: str) -> None:
        self.loaded: dict[int, Target] = {}
        self.refusals: dict[WantedPolicy, str] = {}
        self.changed: Callable[[], None] = lambda: None
        self._store, self._engine, self._table = store, engine, table
        self._ours = re.compile(rf"{re.escape(alias)}-v(\d+)")
        self._wanted: Sequence[WantedPolicy] = ()
        self._due = asyncio.Event()
        self._ready = table.readiness

    async def run(self) -> NoReturn:
        while True:
            self._due.clear()
            answered = self._ready.answered
            try:
                await self._unload_unused(await self._check_engine())
            except ServingError as error:
                self.refusals = {}
                if self._ready.answered == answered:  # else it is busy, and not silent
                    self._ready.note(Event.ENGINE_FAILS, str(error))
            except UNREACHABLE:
                log.debug("the database is down: nothing is unloaded")
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self._ready.unavailable else POLL_S):
                    await self._due.wait()

    def set_wanted(self, policies: Sequence[WantedPolicy]) -> None:
        """Set the policies to hold beside the served ones, in order of urgency."""
        self._wanted = policies
        needed = self._needed()
        self._engine.keep([policy.target for policy in needed])
        kept = {policy.version for policy in needed}
        self.loaded = {v: target for v, target in self.loaded.items() if v in kept}
        self.refusals = {policy: why for policy, why in self.refusals.items() if policy in needed}
        if self._next(set()):
            self._due.set()

    def look(self) -> None:
        """Ask the engine now: a call failed in a way that may be the engine's own state."""
        self._due.set()

    async def _check_engine(self) -> frozenset[str]:
        """Load the wanted policies that the engine lacks; return the names that it held before."""
        # A policy that became wanted after the engine was asked waits for the next check: another
        # gateway may have unloaded it in between. A loaded policy stays loaded even if it is now
        # wanted for another reason, such as a proposal that was just committed.
        before = self._needed()
        held = await self._engine.policies()
        found = [
            policy.target
            for policy in self._needed()
            if policy in before or policy.version in self.loaded
        ]
        self.loaded = {target.policy_version: target for target in found if target.name in held}
        if not self._arms_loaded():
            why = "the engine loads its policies"
            if self._table.route is None:
                why = next(iter(self.refusals.values()), why)
            else:  # it was restarted, and may accept now what it refused
                self.refusals = {}
            self._ready.note(Event.LACKING, why)
        elif self._table.route and self._ready.state in (State.DOUBTED, State.DOWN):
            await self._probe()
        self._report_change()
        tried: set[WantedPolicy] = set()
        while policy := self._next(tried):
            tried.add(policy)
            await self._load(policy)
            self._report_change()
        return held

    def _needed(self) -> list[WantedPolicy]:
        """Return the wanted policies. The served ones come first, in case the engine lost them."""
        arms = self._table.route.arms if self._table.route else ()
        others = (policy for policy in self._wanted if policy.target not in arms)
        return [*map(WantedPolicy, arms), *others]

    def _next(self, tried: set[WantedPolicy]) -> WantedPolicy | None:
        for policy in self._needed():
            given_up = policy in tried or (policy.occasion and policy in self.refusals)
            if policy.version not in self.loaded and not given_up:
                return policy
        return None

    async def _load(self, policy: WantedPolicy) -> None:
        try:
            await self._await_load(self._engine.load(policy.target))
        except EngineDownError:
            raise
        except ServingError as error:
            if self.refusals.get(policy) != str(error):
                log.error("%s is not loaded: %s", policy.target.name, error)
            if self._table.route is None:
                self._ready.note(Event.LACKING, str(error))
            if policy in self._needed():
                self.refusals[policy] = str(error)
        else:
            self.refusals.pop(policy, None)
            if policy in self._needed():
                self.loaded[policy.version] = policy.target

    async def _await_load(self, load: Coroutine[object, object, None]) -> None:
        """Await a load, which may take minutes. Check doubtful arms meanwhile."""
        loading = asyncio.create_task(load)
        try:
            while not (await asyncio.wait([loading], timeout=RETRY_S))[0]:
                doubt = self._due.is_set() or self._ready.state is not State.SERVING
                if doubt and self._table.route:
                    await self._check_arms()
            loading.result()
        finally:
            loading.cancel()

    async def _check_arms(self) -> None:
        try:
            held = await self._engine.policies()
        except ServingError as error:  # the load fails too, and reports it
            log.debug("no check while a policy loads: %s", error)
            return
        route = self._table.route
        if route and not all(arm.name in held for arm in route.arms):
            self._ready.note(Event.LACKING, "the engine lost a policy and loads another")
            return
        if self._ready.state in (State.DOUBTED, State.DOWN):
            await self._probe()
        self._report_change()

    async def _probe(self) -> None:
        """Ask the policies of the route a question of the gateway's own.

        A busy engine may be slow to answer it. Then any answered call shows that it works.
        """
        answered = self._ready.answered
        for arm in self._table.route.arms if self._table.route else ():
            try:
                await self._engine.probe(arm.name)
            except EngineDownError as error:
                if self._ready.answered == answered:
                    self._ready.note(Event.ENGINE_FAILS, str(error))
                    return
        self._ready.note(Event.ENGINE_ANSWERS)

    def _report_change(self) -> None:
        """Call ``changed``, and serve if the route's policies were all that was missing."""
        self.changed()
        if self._table.route and self._arms_loaded():
            self._ready.note(Event.LOADED)

    def _arms_loaded(self) -> bool:
        route = self._table.route
        if route is None:
            return not self._wanted
        return all(arm.policy_version in self.loaded for arm in route.arms)

    async def _unload_unused(self, held: frozenset[str]) -> None:
        """Unload versions that are not wanted, not held by any gateway and not used by any call.

        Proposals and routes are locked meanwhile, so that no version becomes wanted while it is
        unloaded. This gateway's own announcement counts too: a deployment may rely on it.
        """
        needed = {policy.target.name for policy in self._needed()}
        if not self._wanted or not any(self._ours.fullmatch(name) for name in held - needed):
            return
        async with lock_desired(self._store) as (desired, gateways):
            used = wanted(desired).keys() | self._table.in_flight.keys()
            for gateway in gateways:
                used |= {*gateway.loaded, *map(int, gateway.in_flight)}
            used |= {policy.version for policy in self._needed()}
            for name in await self._engine.policies():
                ours = self._ours.fullmatch(name)
                if ours and int(ours[1]) not in used:
                    await self._unload(name)

    async def _unload(self, name: str) -> None:
        try:
            await self._engine.unload(name)
        except EngineDownError:
            raise
        except ServingError as error:  # serving does not depend on it
            log.error("%s stays loaded: %s", name, error)
        else:
            log.info("%s is unloaded", name)
