"""Deployment as agents see it: two gateways, one engine, real checkpoints, calls all the time."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from babylon.core.api_keys import local_key
from babylon.core.errors import CheckpointRefusedError, ServingError
from babylon.core.settings import Settings
from babylon.deployment.change import ChangeRequest, checks_under
from babylon.deployment.experiments import run_experiment
from babylon.deployment.replace import replace_champion
from babylon.deployment.rollback import roll_back
from babylon.policies.checkpoint_files import checkpoint_digest
from babylon.serving.gateway.app import open_gateway
from babylon.store import Store
from babylon.store.policies import ensure_base
from babylon.store.routes import current_route, list_routes
from tests.integration.test_checks import nudged, register
from tests.integration.test_serving import HELLO, Stack, on_uvicorn, running_stack, until_healthy
from tests.tiny_policy import save_tiny_policy

BY_HAND = ChangeRequest(author="operator", reason="by hand", drain_s=10.0)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base, two updates of it, and one that learnt nothing good."""
    root = tmp_path_factory.mktemp("policies")
    base = save_tiny_policy(root / "v0", seed=0)
    return [base, *(nudged(base, root / f"v{v}", s) for v, s in ((1, 0.02), (2, 0.03), (3, 3.0)))]


@dataclass
class Fleet:
    """Agents that call two gateways in turn; each answer is (agent, version, arm)."""

    stack: Stack
    clients: list[AsyncOpenAI]
    answers: list[tuple[int, int, str]] = field(default_factory=list)

    async def play(self, agent: int) -> list[tuple[int, int, str]]:
        answers = []
        for client in self.clients:
            response = await client.chat.completions.with_raw_response.create(
                model="babylon", messages=HELLO, max_tokens=4, stream=True, user=f"agent-{agent}"
            )
            models = {chunk.model async for chunk in response.parse()}
            version = int(response.headers["x-model-version"])
            assert models == {f"babylon-v{version}"}
            answers.append((agent, version, response.headers["x-arm"]))
        self.answers += answers
        return answers

    async def round(self, agents: int = 12) -> list[tuple[int, int, str]]:
        """Everybody calls every gateway once; what they were answered by."""
        played = await asyncio.gather(*(self.play(agent) for agent in range(agents)))
        return sorted({answer for answers in played for answer in answers})

    @asynccontextmanager
    async def playing(self, agents: int = 4) -> AsyncIterator[None]:
        """Calls go on while the block runs; any error is the test's."""
        done = asyncio.Event()

        async def go_on(agent: int) -> None:
            while not done.is_set():
                await self.play(agent)

        async with asyncio.TaskGroup() as group:
            for agent in range(agents):
                group.create_task(go_on(agent))
            yield
            done.set()


@pytest.fixture
async def fleet(store: Store, settings: Settings, checkpoints: list[Path]) -> AsyncIterator[Fleet]:
    """Policy 0 serves; 1, 2 and 3 are registered."""
    base = str(checkpoints[0])
    await ensure_base(store, uri=base, base_model="tiny", digest=checkpoint_digest(base))
    for version, path in enumerate(checkpoints[1:], start=1):
        await register(store, version, path)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with (
            running_stack(store, settings) as stack,
            open_gateway(
                store,
                settings.home,
                settings.serving,
                alias=settings.model.name,
                engine_url=str(stack.engine.make_url("")).rstrip("/"),
                gateway_id="second",
                url=url,
            ) as gateway,
            on_uvicorn(gateway, listener),
            AsyncOpenAI(
                base_url=f"{url}/v1", api_key=str(local_key(settings.home.root)), max_retries=0
            ) as client,
        ):
            for one in (stack.url, url):
                await until_healthy(one)
            yield Fleet(stack, [stack.client, client])


async def test_replace_and_roll_back_live(fleet: Fleet, store: Store, settings: Settings) -> None:
    async with fleet.playing():
        made = await replace_champion(store, checks_under(settings), 1, BY_HAND)
        assert made.checks is not None and made.checks["passed"], made.checks
        assert set(made.acknowledged_by) == {"test", "second"}
        assert made.prepare_s > 0 and made.check_s > 0 and made.unfinished == 0
        back = await roll_back(store, BY_HAND)
        assert (back.policy_version, back.prepare_s, back.checks) == (0, 0.0, None)
    assert {(version, arm) for _, version, arm in await fleet.round()} == {(0, "champion")}
    rows = await fleet.stack.rows()
    served = {row["policy_version"] for row in rows if row["arm"] == "champion"}
    assert {0, 1} <= served
    routed = {route.route_version: route.policy_version for route in await list_routes(store)}
    assert all(
        row["policy_version"] == routed[row["route_version"]]
        for row in rows
        if row["arm"] == "champion"
    )


async def test_a_wrecked_policy_is_refused(fleet: Fleet, store: Store, settings: Settings) -> None:
    async with fleet.playing():
        with pytest.raises(
            CheckpointRefusedError, match=r"policy 3 is refused: kl: .*policy 0 keeps serving"
        ):
            await replace_champion(store, checks_under(settings), 3, BY_HAND)
    assert len(await list_routes(store)) == 1
    assert {version for _, version, _ in fleet.answers} == {0}


async def test_a_checkpoint_that_does_not_load_is_refused_by_the_gateways(
    fleet: Fleet, store: Store, settings: Settings, tmp_path: Path
) -> None:
    await store.pool.execute(
        "UPDATE babylon.policies SET uri = $1 WHERE policy_version = 1", str(tmp_path)
    )
    with pytest.raises(ServingError, match=r"cannot hold policy 1: .*no policy loads"):
        await replace_champion(store, checks_under(settings), 1, BY_HAND)
    assert len(await list_routes(store)) == 1
    assert {version for _, version, _ in await fleet.round()} == {0}


async def test_a_canary_keeps_its_agents(fleet: Fleet, store: Store, settings: Settings) -> None:
    async with fleet.playing():
        await run_experiment(store, checks_under(settings), "canary", 1, 0.3, BY_HAND)
        first = await fleet.round(24)
        await run_experiment(store, checks_under(settings), "canary", None, 0.7, BY_HAND)
        second = await fleet.round(24)
    assert {(version, arm) for _, version, arm in first} == {(0, "champion"), (1, "challenger")}
    assert len({agent for agent, _, _ in first}) == len(first)  # either gateway says the same
    few, many = (
        {agent for agent, version, _ in answers if version == 1} for answers in (first, second)
    )
    assert few < many
    await roll_back(store, BY_HAND)
    assert {(version, arm) for _, version, arm in await fleet.round()} == {(0, "champion")}
    assert (await current_route(store)).split is None


async def test_challengers_load_only_once(fleet: Fleet, store: Store, settings: Settings) -> None:
    await fleet.round()
    await run_experiment(store, checks_under(settings), "ab", 2, 0.5, BY_HAND)
    won = await replace_champion(store, checks_under(settings), 2, BY_HAND)
    assert (won.prepare_s, won.checks) == (0.0, None)
    assert {(version, arm) for _, version, arm in await fleet.round()} == {(2, "champion")}
