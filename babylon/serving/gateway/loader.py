"""Has the engine hold what is wanted: the most urgent first, one after the other.

Apart from the following of routes, because loading may take minutes, and a route to what is loaded
does not wait for it. An engine that was restarted has lost its policies: they are loaded again
before it is served from.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from babylon.core.errors import ServingError
from babylon.serving.gateway.engine_client import EngineClient, EngineDownError
from babylon.serving.gateway.route_table import RouteTable, Target
from babylon.serving.gateway.shipping import DATABASE_FAILURES
from babylon.serving.gateway.wanted_policies import Occasion, wanted
from babylon.store import Store
from babylon.store.desired import nothing_added

log = logging.getLogger(__name__)

POLL_S = 2.0
RETRY_S = 0.25  # while something is wrong


@dataclass(frozen=True, slots=True)
class WantedPolicy:
    """A policy to hold; for one ``occasion`` it is tried once, without one again and again."""

    target: Target
    occasion: Occasion = None

    @property
    def version(self) -> int:
        return self.target.policy_version


class Loader:
    """``loaded``: policy version → what the engine holds for us, of what is wanted; nothing else
    is served from. ``refusals``: what the engine does not load, and why.

    ``changed`` is called after a change of either.
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
                log.debug("the database is away: nothing is unloaded")
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self._table.unavailable else POLL_S):
                    await self._due.wait()

    def want(self, wishes: Sequence[WantedPolicy]) -> None:
        """Hold these, in this order, beside what is served from now; let go of all others."""
        self._wanted = wishes
        needed = self._needed()
        kept = {wish.version for wish in needed}
        self.loaded = {v: target for v, target in self.loaded.items() if v in kept}
        self.refusals = {wish: why for wish, why in self.refusals.items() if wish in needed}
        if self._next(set()):
            self._due.set()

    def doubt(self, reason: str) -> None:
        """Serve nothing until a look says that all is well."""
        self._doubts += 1
        self.refusals = {}
        self.report(reason)
        self._due.set()

    def report(self, reason: str) -> None:
        """Nothing can be served, and why."""
        if self._table.unavailable != reason:
            self._table.unavailable = reason
            log.warning("not serving: %s", reason)

    async def _look(self) -> frozenset[str]:
        """Load what the engine does not hold; returns the names that it held before.

        What came to be wanted after the engine was asked is looked for the next time: in between,
        another gateway may have unloaded it. What was loaded all along stays so, also when it
        became wanted for another reason: a proposal that is committed just now.
        """
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
        """What serves comes first, should the engine have lost it."""
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

    async def _looking_meanwhile(self, load: Coroutine[Any, Any, None]) -> None:
        """A load may take minutes; a doubt that comes up in them does not wait for its end."""
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
        except ServingError as error:  # of the load too: that tells
            log.debug("no look while a policy loads: %s", error)
            return
        route = self._table.route
        if route and all(arm.name in held for arm in route.arms):
            self._tell(doubts)

    def _tell(self, doubts: int) -> None:
        """Others know of the change; and the route is served, if nobody doubted since."""
        self.changed()
        served = self._table.route and self._arms_loaded()
        if self._table.unavailable and served and doubts == self._doubts:
            log.info("serving")
            self._table.unavailable = None

    def _arms_loaded(self) -> bool:
        route = self._table.route
        return route is None or all(arm.policy_version in self.loaded for arm in route.arms)

    async def _unload_others(self, held: frozenset[str]) -> None:
        """Unload versions that nobody wants, no gateway could serve and no call is answered by.

        While nothing can be proposed or routed to, so that none of them is wanted again before it
        is gone. Our own announcement counts too: someone may rely on it until it is renewed.
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
        except ServingError as error:  # no reason to stop serving
            log.error("%s stays loaded: %s", name, error)
        else:
            log.info("%s is unloaded", name)
