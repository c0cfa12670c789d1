"""Pins each trajectory to its first arm for the duration of an experiment, in every gateway.

The database decides, and this process caches its answers. A call gets its pin before it takes the
route, so that nothing is awaited between reading the route and counting the call in.
"""

import asyncio
from contextlib import suppress
from typing import NoReturn

from cachetools import TTLCache

from babylon.core.types import Arm
from babylon.serving.gateway.brief_queries import BriefQueries
from babylon.serving.gateway.play.owners import REMEMBERED_S
from babylon.serving.gateway.route_table import ArmSplit, RouteTable
from babylon.store import Store
from babylon.store.connection import UNREACHABLE
from babylon.store.experiments import pin_arm, pin_arms

RETRY_S = 0.25
MAX_CACHED = 100_000  # trajectories, about 43 MB; the database has the others


class ArmPins:
    """Arm of each (salt, trajectory id)."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._arms = TTLCache[tuple[str, str], Arm](MAX_CACHED, REMEMBERED_S)
        self._unsaved: dict[tuple[str, str], Arm] = {}
        self._queries = BriefQueries()

    async def pin(
        self, table: RouteTable, model: str, key: str, trajectory_id: str | None
    ) -> Arm | None:
        """Return the arm of a call's trajectory under the route in force at the return.

        ``None`` without a trajectory, without an experiment, or if a policy is asked for by name.
        """
        if trajectory_id is None:
            return None
        while (route := table.route) and (split := route.split) and model == route.alias:
            if arm := self._arms.get((split.salt, trajectory_id)):
                return arm
            await self._decide(split, key, trajectory_id)
        return None

    async def run(self) -> NoReturn:
        """Write the arms that were decided without the database, once it answers again."""
        while True:
            await asyncio.sleep(RETRY_S)
            if unsaved := dict(self._unsaved):
                with suppress(*UNREACHABLE):  # RouteFollower reports them
                    await pin_arms(self._store, unsaved)
                    self._unsaved = {k: v for k, v in self._unsaved.items() if k not in unsaved}

    async def _decide(self, split: ArmSplit, key: str, trajectory_id: str) -> None:
        trajectory, chosen = (split.salt, trajectory_id), split.arm(key)
        arm = await self._queries.ask(pin_arm(self._store, *trajectory, chosen))
        if arm is None:
            arm = self._unsaved.setdefault(trajectory, chosen)
            if len(self._unsaved) > MAX_CACHED:  # the oldest keeps its arm by the formula
                del self._unsaved[next(iter(self._unsaved))]
        self._arms.setdefault(trajectory, arm)
