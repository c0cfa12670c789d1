"""The loader's view of loaded policies while an engine and the wanted policies change."""

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from babylon.serving.gateway.engine_client import EngineDownError
from babylon.serving.gateway.engine_pool import EnginePool
from babylon.serving.gateway.loader import PolicyLoader, WantedPolicy
from babylon.serving.gateway.readiness import Event, State
from babylon.serving.gateway.route_table import RouteTable, ServingRoute, Target
from babylon.store import Store

V0, V1, V2 = (Target(f"babylon-v{version}", version, f"/{version}") for version in range(3))


class HoldsTwo:
    """An engine with policies 0 and 1; ``meanwhile`` happens while it is asked for the second
    time."""

    def __init__(self) -> None:
        self.asked, self.loads = 0, list[Target]()
        self.held = {V0.name, V1.name}
        self.loading = asyncio.Event()
        self.meanwhile: Callable[[], None] = lambda: None

    async def policies(self) -> frozenset[str]:
        self.asked += 1
        if self.asked == 2:
            self.meanwhile()
        return frozenset(self.held)

    def keep(self, targets: Sequence[Target]) -> None:
        """An engine that is not restarted loads nothing by itself."""

    async def load(self, target: Target) -> None:
        self.loads.append(target)
        await self.loading.wait()


async def looked(engine: HoldsTwo, loader: PolicyLoader, meanwhile: Callable[[], None]) -> None:
    """Two checks of the engine by the loader."""
    engine.meanwhile = meanwhile
    running = asyncio.create_task(loader.run())
    async with asyncio.timeout(20):
        while engine.asked < 2 and not running.done():
            loader.look()
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def holding(engine: HoldsTwo) -> tuple[PolicyLoader, RouteTable]:
    """Policy 0 serves; 1 is proposed."""
    table = RouteTable()
    table.route = ServingRoute(1, "babylon", V0)
    loader = PolicyLoader(cast(Store, None), cast(EnginePool, engine), table, "babylon")
    loader.set_wanted([WantedPolicy(V0), WantedPolicy(V1, "proposal 5")])
    return loader, table


async def test_a_proposal_that_is_committed_while_the_engine_is_asked_stays_loaded() -> None:
    engine = HoldsTwo()
    loader, table = holding(engine)

    def commit() -> None:
        assert loader.loaded == {0: V0, 1: V1}
        table.route = ServingRoute(2, "babylon", V1)
        loader.set_wanted([WantedPolicy(V1), WantedPolicy(V0, "route 2")])

    await looked(engine, loader, commit)
    assert loader.loaded == {1: V1, 0: V0} and not engine.loads
    assert table.readiness.unavailable is None


async def test_what_comes_to_be_wanted_while_the_engine_is_asked_is_not_taken_for_loaded() -> None:
    engine = HoldsTwo()
    loader, _ = holding(engine)
    loader.set_wanted([WantedPolicy(V0)])
    engine.held = {V0.name}

    def propose() -> None:
        engine.held.add(V1.name)  # by another gateway, which may unload it before it hears of this
        loader.set_wanted([WantedPolicy(V0), WantedPolicy(V1, "proposal 6")])

    await looked(engine, loader, propose)
    assert engine.loads == [V1]


@pytest.mark.parametrize("lost", [False, True])
async def test_a_doubt_during_a_load_ends_once_the_engine_has_the_policy(
    lost: bool,
) -> None:
    engine = HoldsTwo()
    loader, table = holding(engine)
    loader.set_wanted([WantedPolicy(V0), WantedPolicy(V1), WantedPolicy(V2, "proposal 6")])
    running = asyncio.create_task(loader.run())
    while not engine.loads:
        await asyncio.sleep(0.01)
    assert table.readiness.unavailable is None
    engine.held -= {V0.name} if lost else set()
    loader.look()
    asked = engine.asked
    async with asyncio.timeout(20):
        while engine.asked < asked + 2:
            await asyncio.sleep(0.01)
    assert (table.readiness.unavailable is not None) == lost
    assert engine.loads == [V2]  # and still loads
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("busy", [True, False])
async def test_an_engine_that_answers_calls_meanwhile_is_busy_and_not_down(busy: bool) -> None:
    engine = HoldsTwo()
    loader, table = holding(engine)
    table.readiness.note(Event.LOADED)

    def silent() -> None:
        if busy:
            table.readiness.call_ended(V0.name, 200)
        raise EngineDownError("no answer within 5 s")

    await looked(engine, loader, silent)
    assert (table.readiness.state is State.SERVING) is busy


async def test_an_engine_that_comes_late_to_no_policy_serves_nothing() -> None:
    engine, table = HoldsTwo(), RouteTable()
    loader = PolicyLoader(cast(Store, None), cast(EnginePool, engine), table, "babylon")
    table.readiness.note(Event.ENGINE_FAILS, "connection refused")
    await looked(engine, loader, lambda: None)
    assert table.readiness.unavailable
    table.readiness.note(Event.NO_ROUTE)
    assert table.readiness.state is State.NO_POLICY
