"""Has the engine hold what is wanted: the most urgent first, one after the other.

Apart from the following of routes, because loading may take minutes, and a route to what is loaded
does not wait for it. An engine that was restarted has lost its policies: they are loaded again
before it is served from.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from babylon.errors import ServingError
from babylon.gateway.desired import Occasion, wanted
from babylon.gateway.engine import Engine, EngineDownError
from babylon.gateway.routes import RouteTable, Target
from babylon.gateway.shipping import DATABASE_FAILURES
from babylon.store import Store
from babylon.store.desired import nothing_added

log = logging.getLogger(__name__)

POLL_S = 2.0
RETRY_S = 0.25  # while something is wrong


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the engine does not load a policy, and for which occasion it was tried."""

    reason: str
    occasion: Occasion


class Loader:
    """``loaded``: policy version → what the engine holds for us, of what is wanted; nothing else
    is served from. ``refusals``: policy version → why it is not among them.

    ``changed`` is called after a change of either.
    """

    def __init__(self, store: Store, engine: Engine, table: RouteTable, alias: str) -> None:
        self.loaded: dict[int, Target] = {}
        self.refusals: dict[int, Refusal] = {}
        self.changed: Callable[[], None] = lambda: None
        self._store, self._engine, self._table = store, engine, table
        self._ours = re.compile(rf"{re.escape(alias)}-v(\d+)")
        self._wanted: Mapping[Target, Occasion] = {}
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

    def want(self, targets: Mapping[Target, Occasion]) -> None:
        """Hold these, in this order, beside what is served from now; let go of all others."""
        self._wanted = targets
        kept = {target.policy_version for target in self._needed()}
        self.loaded = {v: target for v, target in self.loaded.items() if v in kept}
        self.refusals = {v: refusal for v, refusal in self.refusals.items() if v in kept}
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
        another gateway may have unloaded it.
        """
        doubts, asked_for = self._doubts, self._needed()
        held = await self._engine.policies()
        found = {target for target in asked_for if target.name in held} & self._needed().keys()
        self.loaded = {target.policy_version: target for target in found}
        if self._table.route and not found.issuperset(self._table.route.arms):
            self.report("the engine was restarted and loads its policies")
        self._tell(doubts)
        tried: set[tuple[Target, Occasion]] = set()
        while missing := self._next(tried):
            tried.add(missing)
            await self._load(*missing)
            self._tell(doubts)
        return held

    def _needed(self) -> dict[Target, Occasion]:
        """What serves comes first, should the engine have lost it."""
        route = self._table.route
        arms: dict[Target, Occasion] = dict.fromkeys(route.arms if route else ())
        return arms | {target: o for target, o in self._wanted.items() if target not in arms}

    def _next(self, tried: set[tuple[Target, Occasion]]) -> tuple[Target, Occasion] | None:
        for target, occasion in self._needed().items():
            version = target.policy_version
            refusal = self.refusals.get(version)
            given_up = refusal and occasion and refusal.occasion == occasion
            if version not in self.loaded and not given_up and (target, occasion) not in tried:
                return target, occasion
        return None

    async def _load(self, target: Target, occasion: Occasion) -> None:
        version = target.policy_version
        try:
            await self._engine.load(target)
        except EngineDownError:
            raise
        except ServingError as error:
            before, reason = self.refusals.get(version), str(error)
            self.refusals[version] = Refusal(reason, occasion)
            if before is None or before.reason != reason:
                log.error("%s is not loaded: %s", target.name, reason)
            if self._table.route is None:
                self.report(reason)
        else:
            self.refusals.pop(version, None)
            if target in self._needed():
                self.loaded[version] = target

    def _tell(self, doubts: int) -> None:
        """Others know of the change; and the route is served, if nobody doubted since."""
        self.changed()
        route = self._table.route
        arms_loaded = route and all(arm.policy_version in self.loaded for arm in route.arms)
        if self._table.unavailable and arms_loaded and doubts == self._doubts:
            log.info("serving")
            self._table.unavailable = None

    async def _unload_others(self, held: frozenset[str]) -> None:
        """Unload versions that nobody wants, no gateway could serve and no call is answered by.

        While nothing can be proposed or routed to, so that none of them is wanted again before it
        is gone. Our own announcement counts too: someone may rely on it until it is renewed.
        """
        needed = {target.name for target in self._needed()}
        if not self._wanted or not any(self._ours.fullmatch(name) for name in held - needed):
            return
        async with nothing_added(self._store) as (desired, gateways):
            used = wanted(desired).keys() | self._table.in_flight.keys()
            for gateway in gateways:
                used |= {*gateway.loaded, *map(int, gateway.in_flight)}
            for name in await self._engine.policies() - {t.name for t in self._needed()}:
                ours = self._ours.fullmatch(name)
                if ours and int(ours[1]) not in used:
                    await self._engine.unload(name)
                    log.info("%s is unloaded", name)
