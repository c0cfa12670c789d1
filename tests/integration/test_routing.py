"""Two gateway replicas over one engine: routing, experiments and announcements."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from openai import AsyncOpenAI

from babylon.core.errors import ServingError
from babylon.core.settings import Settings
from babylon.serving.engine.engine_process import POLICIES, make_app
from babylon.serving.engine.running_batch import Batch
from babylon.serving.gateway.gateway_process import new_gateway_id, remove_dead_gateways
from babylon.serving.gateway.route_table import ArmSplit, Target
from babylon.store import Store, open_store
from babylon.store.calls import wait_until_recorded
from babylon.store.gateways import (
    GatewayRow,
    announce_gateway,
    live_gateways,
    remove_gateway,
    wait_for_acks,
    wait_until_drained,
    wait_until_loaded,
)
from babylon.store.proposals import proposed
from babylon.store.routes import Split as StoredSplit
from babylon.store.routes import commit_route, current_route
from tests.integration.test_serving import (
    HELLO,
    openai_client,
    register,
    running_gateway,
    until_healthy,
)
from tests.switchable_relay import SwitchableRelay
from tests.tiny_policy import save_tiny_policy

CHALLENGER = Target("babylon-v1", 1, "")
WAIT_S = 20.0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("policies")
    return [save_tiny_policy(root / f"v{version}", seed=version) for version in range(3)]


@dataclass
class Replicas:
    """Two gateways; ``loads`` are the requests to load a policy that their engine got."""

    store: Store
    clients: list[AsyncOpenAI]
    engine: web.Application
    loads: list[str]

    async def ask(self, agent: str, trajectory: str | None = None, *, at: int = 0) -> Any:
        """One answer's headers; ``at`` is the replica."""
        return (await self.chat(agent, trajectory, at=at)).headers

    async def chat(
        self, agent: str, trajectory: str | None = None, *, at: int = 0, **options: Any
    ) -> Any:
        identity = {"x-babylon-agent": agent}
        if trajectory:
            identity |= {"x-babylon-trajectory": trajectory, "x-babylon-step": "0"}
        asked = {"model": "babylon", "messages": HELLO, "max_tokens": 1, **options}
        return await self.clients[at].chat.completions.with_raw_response.create(
            **asked, extra_headers=identity
        )

    async def route_to(self, policy_version: int, split: StoredSplit | None = None) -> None:
        version = await commit_route(
            self.store,
            policy_version=policy_version,
            author="test",
            reason="test",
            expected_route_version=(await current_route(self.store)).route_version,
            split=split,
        )
        assert len(await wait_for_acks(self.store, version, policy_version, WAIT_S)) == 2

    async def share(self, share: float, salt: str = "experiment") -> None:
        """Policy 1 challenges policy 0."""
        split = StoredSplit(mode="canary", challenger_version=1, share=share, salt=salt)
        await self.route_to(0, split)

    async def propose_and_route_to(self, policy_version: int) -> None:
        async with proposed(self.store, policy_version, "test"):
            await wait_until_loaded(self.store, policy_version, WAIT_S)
            await self.route_to(policy_version)

    @property
    def held(self) -> set[str]:
        return {policy.name for policy in self.engine[POLICIES]}

    async def until_held(self, *names: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.held != set(names):
                await asyncio.sleep(0.02)


@asynccontextmanager
async def running(
    store: Store, settings: Settings, behind: Store | None = None
) -> AsyncIterator[Replicas]:
    """``behind``: the store of the gateways, where it is not the test's."""
    loads: list[str] = []

    @web.middleware
    async def noting(request: web.Request, handler: Any) -> Any:
        if request.method == "PUT":
            loads.append(request.match_info["name"])
        return await handler(request)

    engine = make_app()
    engine.middlewares.append(noting)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(TestServer(engine, host="127.0.0.1"))
        engine_url = str(server.make_url("")).rstrip("/")
        clients = []
        for number in (0, 1):
            gateway = running_gateway(behind or store, settings, engine_url, f"replica-{number}")
            url = await stack.enter_async_context(gateway)
            await until_healthy(url)
            clients.append(await stack.enter_async_context(openai_client(url, settings)))
        while len(await live_gateways(store)) < 2:  # nobody waits for one that is unknown
            await asyncio.sleep(0.01)
        yield Replicas(store, clients, engine, loads)


@pytest.fixture
async def replicas(
    store: Store, settings: Settings, checkpoints: list[Path]
) -> AsyncIterator[Replicas]:
    await register(store, checkpoints)
    async with running(store, settings) as replicas:
        yield replicas


def agents(count: int, smaller: float, greater: float) -> list[str]:
    """Agents that come to the challenger when its share grows."""
    before, after = (ArmSplit(CHALLENGER, share, "experiment") for share in (smaller, greater))
    names = (f"agent-{number}" for number in range(10_000))
    found = (n for n in names if before.arm(n) == "champion" and after.arm(n) == "challenger")
    return [next(found) for _ in range(count)]


async def test_all_replicas_split_agents_alike_and_record_the_arm(
    replicas: Replicas,
) -> None:
    await replicas.share(0.4)
    names = [f"agent-{number}" for number in range(24)]
    answers = [
        await asyncio.gather(*(replicas.ask(name, at=at) for name in names)) for at in (0, 1)
    ]
    expected = [ArmSplit(CHALLENGER, 0.4, "experiment").arm(name) for name in names]
    assert {"champion", "challenger"} == set(expected)
    for headers in answers:
        assert [answer["x-arm"] for answer in headers] == expected
        assert all(
            answer["x-model-version"] == str(int(answer["x-arm"] == "challenger"))
            for answer in headers
        )
    await wait_until_recorded(replicas.store)
    rows = await replicas.store.pool.fetch("SELECT * FROM babylon.calls")
    recorded = {(row["agent_id"], row["arm"], row["policy_version"]) for row in rows}
    arms = zip(names, expected, strict=True)
    assert recorded == {(name, arm, int(arm == "challenger")) for name, arm in arms}
    assert len(rows) == 2 * len(names)


async def test_a_trajectory_keeps_its_arm_in_a_ramp_on_every_replica(
    replicas: Replicas,
) -> None:
    (agent,) = agents(1, 0.1, 0.9)
    await replicas.share(0.1)
    assert (await replicas.ask(agent, "begun before"))["x-arm"] == "champion"
    await replicas.share(0.9)
    for at in (0, 1):
        assert (await replicas.ask(agent, "begun before", at=at))["x-arm"] == "champion"
        assert (await replicas.ask(agent, "begun after", at=at))["x-arm"] == "challenger"
        assert (await replicas.ask(agent, at=at))["x-arm"] == "challenger"
    await replicas.share(0.9, salt=next_salt(agent))  # the next experiment begins anew
    assert (await replicas.ask(agent, "begun before"))["x-arm"] == "challenger"
    await replicas.route_to(0)
    assert (await replicas.ask(agent, "begun after"))["x-arm"] == "champion"


def next_salt(agent: str) -> str:
    """Salt of an experiment with a share of 0.9 that gives the agent to the challenger."""
    salts = (f"next-{number}" for number in range(100))
    return next(
        salt for salt in salts if ArmSplit(CHALLENGER, 0.9, salt).arm(agent) == "challenger"
    )


async def test_a_trajectory_keeps_its_arm_while_the_database_is_away_and_afterwards(
    store: Store, settings: Settings, checkpoints: list[Path]
) -> None:
    early, late = agents(2, 0.1, 0.9)
    await register(store, checkpoints)
    relay, proxied = SwitchableRelay.of(settings)
    async with (
        relay,
        open_store(proxied) as behind,
        running(store, settings, behind) as replicas,
    ):
        await replicas.share(0.1)
        assert (await replicas.ask(early, "early"))["x-arm"] == "champion"
        relay.shut()
        assert (await replicas.ask(early, "early"))["x-arm"] == "champion"
        assert (await replicas.ask(late, "late"))["x-arm"] == "champion"  # the split decides
        await relay.open()
        async with asyncio.timeout(WAIT_S):
            while not await store.pool.fetchval(
                "SELECT arm FROM babylon.trajectory_arms WHERE trajectory_id = 'late'"
            ):
                await asyncio.sleep(0.02)
        await replicas.share(0.9)
        for at, (agent, trajectory) in enumerate([(late, "late"), (early, "early")]):
            headers = await replicas.ask(agent, trajectory, at=1 - at)
            assert headers["x-arm"] == "champion"


async def test_a_call_does_not_wait_for_a_database_slow_with_the_arm(
    replicas: Replicas,
) -> None:
    (agent,) = agents(1, 0.1, 0.9)
    await replicas.share(0.9)
    async with replicas.store.pool.acquire() as connection:
        async with connection.transaction():
            await connection.execute("LOCK TABLE babylon.trajectory_arms")
            assert (await replicas.ask(agent, "slow"))["x-arm"] == "challenger"
            await replicas.share(0.1)  # who is called back is not kept waiting either
            assert (await replicas.ask(agent, "slow"))["x-arm"] == "challenger"
        async with asyncio.timeout(WAIT_S):
            while not await connection.fetchval("SELECT arm FROM babylon.trajectory_arms"):
                await asyncio.sleep(0.02)
    assert (await replicas.ask(agent, "slow", at=1))["x-arm"] == "challenger"


async def test_a_proposed_policy_is_loaded_everywhere_before_routing(
    replicas: Replicas,
) -> None:
    async with proposed(replicas.store, 1, "test"):
        gateways = await wait_until_loaded(replicas.store, 1, WAIT_S)
        assert [gateway.loaded for gateway in gateways] == [[0, 1], [0, 1]]
        for at in (0, 1):
            assert (await replicas.ask("agent", at=at))["x-model-version"] == "0"
            answer = await replicas.chat("agent", at=at, model="babylon-v1")
            assert (answer.headers["x-arm"], answer.headers["x-model-version"]) == ("pinned", "1")
    await replicas.until_held("babylon-v0")  # nobody routed to it
    with pytest.raises(openai.NotFoundError, match="'babylon-v1' does not exist"):
        await replicas.chat("agent", model="babylon-v1")


async def test_a_refused_proposal_disturbs_nothing_and_the_next_one_is_tried_again(
    replicas: Replicas, checkpoints: list[Path], tmp_path: Path
) -> None:
    moved = "UPDATE babylon.policies SET uri = $1 WHERE policy_version = 1"
    await replicas.store.pool.execute(moved, str(tmp_path))
    for _ in range(2):
        with pytest.raises(ServingError, match=rf"cannot hold policy 1: .*{tmp_path}"):
            async with proposed(replicas.store, 1, "test"):
                await wait_until_loaded(replicas.store, 1, WAIT_S)
    for at in (0, 1):
        assert (await replicas.ask("agent", at=at))["x-model-version"] == "0"
    assert 2 <= replicas.loads.count("babylon-v1") <= 4  # once for each, at each replica
    await replicas.store.pool.execute(moved, str(checkpoints[1]))
    await replicas.propose_and_route_to(1)
    assert (await replicas.ask("agent"))["x-model-version"] == "1"


@pytest.fixture
def slow_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of 300 tokens lasts seconds, so that a route changes within it on any machine."""
    step = Batch.step

    def slowly(batch: Batch) -> None:
        time.sleep(0.02)
        step(batch)

    monkeypatch.setattr(Batch, "step", slowly)


async def test_a_rollback_loads_nothing_and_reports_the_last_call(
    replicas: Replicas, slow_tokens: None
) -> None:
    await replicas.propose_and_route_to(1)
    loads = len(replicas.loads)
    stream = (await replicas.chat("agent", stream=True, max_tokens=300, seed=4)).parse()
    await anext(stream)
    await replicas.route_to(0)
    assert await wait_until_drained(replicas.store, 1, timeout_s=0) == 1
    assert (await replicas.ask("agent", at=1))["x-model-version"] == "0"
    draining = asyncio.create_task(wait_until_drained(replicas.store, 1, 3 * WAIT_S))
    assert {chunk.model async for chunk in stream} == {"babylon-v1"}
    assert await draining == 0
    assert len(replicas.loads) == loads


async def test_calls_for_a_version_by_name_keep_no_deployment_waiting(
    replicas: Replicas, slow_tokens: None
) -> None:
    await replicas.propose_and_route_to(1)
    asked = await replicas.chat("agent", model="babylon-v1", stream=True, max_tokens=300, seed=4)
    stream = asked.parse()
    await anext(stream)
    await replicas.route_to(0)
    assert await wait_until_drained(replicas.store, 1, timeout_s=0) == 0
    answering = [gateway.in_flight for gateway in await live_gateways(replicas.store)]
    assert {"1": 0} in answering
    assert {chunk.model async for chunk in stream} == {"babylon-v1"}


async def test_the_previous_champion_stays_loaded(replicas: Replicas, settings: Settings) -> None:
    await replicas.propose_and_route_to(2)
    split = StoredSplit(mode="ab", challenger_version=1, share=0.5, salt="experiment")
    await replicas.route_to(2, split)
    await replicas.route_to(2)
    await replicas.until_held("babylon-v0", "babylon-v2")
    async with running(replicas.store, settings) as restarted:
        await restarted.until_held("babylon-v0", "babylon-v2")


async def test_an_engine_that_lost_its_policies_gets_both_arms_again(replicas: Replicas) -> None:
    await replicas.share(0.5)
    for name in replicas.held:
        replicas.engine[POLICIES].unload(name)
    for agent in (*agents(1, 0.01, 0.5), *agents(1, 0.5, 0.99)):  # one of each arm
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    await replicas.ask(agent)
                    break
                except openai.InternalServerError as error:
                    assert error.status_code == 503
                    await asyncio.sleep(0.02)
    assert {"babylon-v0", "babylon-v1"} <= replicas.held


async def test_what_another_gateway_could_serve_stays_loaded(replicas: Replicas) -> None:
    other = GatewayRow(gateway_id="other", url="http://other", route_version=1, loaded=[0, 1])

    async def live() -> None:
        while True:
            await announce_gateway(replicas.store, other)
            await asyncio.sleep(0.5)

    living = asyncio.create_task(live())
    async with proposed(replicas.store, 1, "test"):
        await replicas.until_held("babylon-v0", "babylon-v1")
    async with proposed(replicas.store, 2, "test"):
        await replicas.until_held("babylon-v0", "babylon-v1", "babylon-v2")
    await replicas.until_held("babylon-v0", "babylon-v1")
    living.cancel()
    await remove_gateway(replicas.store, "other")
    await replicas.until_held("babylon-v0")


async def test_replicas_of_one_address_differ_and_a_killed_one_is_forgotten(
    store: Store,
) -> None:
    mine, beside = new_gateway_id(8000), new_gateway_id(8000)
    assert mine != beside
    killed = mine.replace(f":{os.getpid()}:", f":{2**22 + 1}:")  # no process has that id
    elsewhere = new_gateway_id(8001)
    for gateway_id in (killed, elsewhere):
        await announce_gateway(store, GatewayRow(gateway_id=gateway_id, url="", route_version=1))
    await remove_dead_gateways(store, mine)
    assert [gateway.gateway_id for gateway in await live_gateways(store)] == [elsewhere]
    await remove_gateway(store, elsewhere)
