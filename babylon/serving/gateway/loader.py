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
from babylon.serving.gateway.engine_client import EngineClient, EngineDownError
from babylon.serving.gateway.route_table import RouteTable, Target
from babylon.serving.gateway.shipping import DATABASE_FAILURES
from babylon.serving.gateway.wanted_policies import Occasion, wanted
from babylon.store import Store
from babylon.store.desired import nothing_added

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

    def __init__(self, store: Store, engine: EngineClient, table: RouteTable, alias: str) -> None:
        self.loaded: dict[int, Target] = {}
        self.refusals: dict[WantedPolicy, str] = {}
        self.changed: Callable[[], None] = lambda: None
        self._store, self._engine, self._table = store, engine, table
        self._ours = re.compile(rf"{re.escape(alias)}-v(\d+)")
        self._wanted: Sequence[WantedPolicy] = ()
        self._due = asyncio.Event()
        self._doubts = 0

    async def run(self) -> NoReturn:
        while True:
            self._due.clear()
            try:
                await self._unload_others(await self._look())
            except ServingError as error:
                self.refusals = {}
                self.report(str(error))
            except DATABASE_FAILURES:
                log.debug("the database is down: nothing is unloaded")
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self._table.unavailable else POLL_S):
                    await self._due.wait()

    def want(self, wishes: Sequence[WantedPolicy]) -> None:
        """Set the policies to hold beside the served ones, in order of urgency."""
        self._wanted = wishes
        needed = self._needed()
        kept = {wish.version for wish in needed}
        self.loaded = {v: target for v, target in self.loaded.items() if v in kept}
        self.refusals = {wish: why for wish, why in self.refusals.items() if wish in needed}
        if self._next(set()):
            self._due.set()

    def doubt(self, reason: str) -> None:
        """Stop serving until a check of the engine succeeds."""
        self._doubts += 1
        self.refusals = {}
        self.report(reason)
        self._due.set()

    def report(self, reason: str) -> None:
        """Set the reason why nothing can be served."""
        if self._table.unavailable != reason:
            self._table.unavailable = reason
            log.warning("not serving: %s", reason)

    async def _look(self) -> frozenset[str]:
        """Compare the engine's policies with the wanted ones, and load the missing.

        Returns:
            Names of the policies that the engine held before.
        """
        # A policy that became wanted after the engine was asked waits for the next check: another
        # gateway may have unloaded it in between. A loaded policy stays loaded even if it is now
        # wanted for another reason, such as a proposal that was just committed.
        doubts, before = self._doubts, self._needed()
        held = await self._engine.policies()
        found = [
            wish.target for wish in self._needed() if wish in before or wish.version in self.loaded
        ]
        self.loaded = {target.policy_version: target for target in found if target.name in held}
        if not self._arms_loaded():
            self.report("the engine was restarted and loads its policies")
        self._tell(doubts)
        tried: set[WantedPolicy] = set()
        while wish := self._next(tried):
            tried.add(wish)
            await self._load(wish)
            self._tell(doubts)
        return held

    def _needed(self) -> list[WantedPolicy]:
        """Return the wanted policies. The served ones come first, in case the engine lost them."""
        arms = self._table.route.arms if self._table.route else ()
        return [
            *map(WantedPolicy, arms),
            *(wish for wish in self._wanted if wish.target not in arms),
        ]

    def _next(self, tried: set[WantedPolicy]) -> WantedPolicy | None:
        for wish in self._needed():
            given_up = wish in tried or (wish.occasion and wish in self.refusals)
            if wish.version not in self.loaded and not given_up:
                return wish
        return None

    async def _load(self, wish: WantedPolicy) -> None:
        try:
            await self._looking_meanwhile(self._engine.load(wish.target))
        except EngineDownError:
            raise
        except ServingError as error:
            if self.refusals.get(wish) != str(error):
                log.error("%s is not loaded: %s", wish.target.name, error)
            if self._table.route is None:
                self.report(str(error))
            if wish in self._needed():
                self.refusals[wish] = str(error)
        else:
            self.refusals.pop(wish, None)
            if wish in self._needed():
                self.loaded[wish.version] = wish.target

    async def _looking_meanwhile(self, load: Coroutine[object, object, None]) -> None:
        """Await a load, which may take minutes, and check the served policies on doubt."""
        loading = asyncio.create_task(load)
        try:
            while not (await asyncio.wait([loading], timeout=RETRY_S))[0]:
                if self._table.unavailable and self._table.route:
                    await self._look_at_arms()
            loading.result()
        finally:
            loading.cancel()

    async def _look_at_arms(self) -> None:
        doubts = self._doubts
        try:
            held = await self._engine.policies()
        except ServingError as error:  # the load fails too, and reports it
            log.debug("no check while a policy loads: %s", error)
            return
        route = self._table.route
        if route and all(arm.name in held for arm in route.arms):
            self._tell(doubts)

    def _tell(self, doubts: int) -> None:
        """Report a change, and serve again if there was no doubt since the check began."""
        self.changed()
        served = self._table.route and self._arms_loaded()
        if self._table.unavailable and served and doubts == self._doubts:
            log.info("serving")
            self._table.unavailable = None

    def _arms_loaded(self) -> bool:
        route = self._table.route
        return route is None or all(arm.policy_version in self.loaded for arm in route.arms)

    async def _unload_others(self, held: frozenset[str]) -> None:
        """Unload versions that are not wanted, not held by any gateway and not used by any call.

        Proposals and routes are locked meanwhile, so that no version becomes wanted while it is
        unloaded. This gateway's own announcement counts too: a deployment may rely on it.
        """
        needed = {wish.target.name for wish in self._needed()}
        if not self._wanted or not any(self._ours.fullmatch(name) for name in held - needed):
            return
        async with nothing_added(self._store) as (desired, gateways):
            used = wanted(desired).keys() | self._table.in_flight.keys()
            for gateway in gateways:
                used |= {*gateway.loaded, *map(int, gateway.in_flight)}
            used |= {wish.version for wish in self._needed()}
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
