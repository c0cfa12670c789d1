"""Matches through the engine that serves: the replies of this process, without its models."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from babylon.core.errors import ServingError
from babylon.core.settings import Settings
from babylon.evaluation.arena import engine_players
from babylon.evaluation.arena.checkpoint_replies import reply_policy
from babylon.evaluation.arena.engine_players import EngineTable, engine_table, entered
from babylon.evaluation.arena.play import play, scripted
from babylon.evaluation.arena.players import Player, policy_player
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.evaluation.preferences.draws import ReplyDraw
from babylon.evaluation.preferences.engine_sample import engine_replies
from babylon.evaluation.tasks import task_gate
from babylon.evaluation.tasks.task_gate import served
from babylon.game.market.scenario import Rules
from babylon.game.market.scripted import news_follower
from babylon.game.market.transcripts import scripted_chats
from babylon.serving import pinned_calls
from babylon.serving.engine.engine_process import make_app
from babylon.store import Store
from babylon.store.gateways import GatewayRow, live_gateways
from babylon.store.policies import get_policy
from tests.deployments import announced, three_policies
from tests.integration.test_serving import (
    Stack,
    register,
    running_gateway,
    running_stack,
    until_healthy,
)
from tests.tiny_policy import tiny_model, tiny_tokenizer

WORLDS = unseen_scenarios("test", "engine players", 3, Rules(ticks=2))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = [tmp_path_factory.mktemp("policies") / f"v{seed}" for seed in range(2)]
    for seed, path in enumerate(paths):
        tiny_model(seed, max_position_embeddings=8192).save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
    return paths


@pytest.fixture
async def stack(store: Store, settings: Settings, checkpoints: list[Path]) -> AsyncIterator[Stack]:
    """Serves policy 0; policy 1 is registered."""
    await register(store, checkpoints)
    async with running_stack(store, settings) as stack:
        await until_healthy(stack.url)
        await until_live(store)
        yield stack


async def until_live(store: Store) -> None:
    """Wait for a gateway: on a busy machine one may count as dead for a while."""
    while not await live_gateways(store):
        await asyncio.sleep(0.05)


async def players(store: Store) -> list[Player]:
    return [policy_player(store.home, await get_policy(store, version), 0) for version in (0, 1)]


def unloadable() -> NoReturn:
    raise AssertionError("a model was loaded into this process")


async def test_the_engine_draws_the_replies_that_this_process_would(
    stack: Stack, checkpoints: list[Path]
) -> None:
    chats = [chat[:-1] for chat, _ in zip(scripted_chats(6), range(12), strict=False)]
    seeds = list(range(2**55, 2**55 + len(chats)))
    async with engine_table(stack.store, "babylon", [0, 1]) as table:
        assert table is not None
        for version, path in enumerate(checkpoints):
            drawn = await table.answers(version, chats, seeds)
            own = await asyncio.to_thread(reply_policy(str(path)), chats, seeds)
            # rounding in another batch may move a token of a random model with flat distributions
            assert sum(a == b for a, b in zip(drawn, own, strict=True)) >= len(chats) - 2
    assert await stack.rows() == []  # the calls of whole games are not recorded
    outcomes = await stack.store.pool.fetch("SELECT outcome FROM babylon.proposals")
    assert [row["outcome"] for row in outcomes] == ["played", "played"]


async def test_a_gateway_that_was_started_again_is_asked_with_its_new_key(
    store: Store, settings: Settings, checkpoints: list[Path]
) -> None:
    await register(store, checkpoints)
    chats = [[{"role": "user", "content": "m1 0.50"}]]
    async with TestServer(make_app(), host="127.0.0.1") as engine:
        url = str(engine.make_url("")).rstrip("/")
        async with running_gateway(store, settings, url) as first:
            await until_healthy(first)
            await until_live(store)
            # Entered here and left below: the match outlives the gateway.
            match = engine_table(store, "babylon", [0])
            table = await match.__aenter__()
        assert table is not None
        async with running_gateway(store, settings, url) as second:
            await until_healthy(second)
            moved = replace(table.gateways[0], url=second)
            table = replace(table, gateways=[moved])
            before = list(table.keys)
            assert len(await table.answers(0, chats, [1])) == 1
            assert table.keys != before
            await match.__aexit__(None, None, None)


async def test_registered_policies_play_without_a_model_in_this_process(stack: Stack) -> None:
    known = [replace(player, enter=unloadable) for player in await players(stack.store)]
    async with entered(stack.store, "babylon", 0, known) as deciders:
        for decide in deciders:
            plays = await asyncio.to_thread(play, decide, WORLDS, seats=2, copies=2)
            assert len(plays.pnl) == len(WORLDS)


async def test_a_policy_that_never_serves_again_plays_in_this_process(store: Store) -> None:
    """No gateway loads it, and the leaderboard of a week has several."""
    await three_policies(store)
    await store.pool.execute(
        "INSERT INTO babylon.releases (policy_version, author, reason) VALUES (1, 'me', 'again')"
    )
    (released,) = [one for one in await players(store) if one.version == 1]
    own = scripted(news_follower)
    async with (
        announced(store),
        entered(store, "babylon", 0, [replace(released, enter=lambda: own)]) as (decide,),
    ):
        assert decide is own


@pytest.mark.parametrize("end", ["", "/"], ids=["address", "address with a slash"])
async def test_a_task_of_ones_own_is_played_by_the_engine_too(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """GATEWAY_ADDRESS may end with a slash."""

    @asynccontextmanager
    async def announced(*asked: Any) -> AsyncIterator[EngineTable]:
        async with engine_table(*asked) as table:
            assert table is not None
            yield replace(table, gateways=[replace(g, url=g.url + end) for g in table.gateways])

    monkeypatch.setattr(task_gate, "engine_table", announced)
    policies = [await get_policy(stack.store, version) for version in (0, 1)]
    async with served(stack.store, "babylon", *policies) as endpoints:
        for version, endpoint in enumerate(endpoints):
            answer = await endpoint.client.chat.completions.create(
                model=endpoint.model,
                messages=[{"role": "user", "content": "1+1="}],
                max_tokens=4,
                seed=1,
            )
            assert (answer.model, endpoint.model) == (f"babylon-v{version}",) * 2
    assert await stack.rows() == []


async def test_without_a_gateway_checkpoints_are_loaded_here(
    store: Store, checkpoints: list[Path]
) -> None:
    await register(store, checkpoints)
    async with entered(store, "babylon", 0, await players(store)) as (old, new):
        assert len((await asyncio.to_thread(play, old, WORLDS)).pnl) == len(WORLDS)
        assert old is not new
    assert await store.pool.fetchval("SELECT count(*) FROM babylon.proposals") == 0


async def test_an_engine_that_restarts_is_waited_for_and_another_policy_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses, versions = [503, 404, 200, 200, 400], iter(["7", "5"])

    async def chat(request: web.Request) -> web.Response:
        if (status := statuses.pop(0)) != 200:
            return web.json_response({"error": "the prompt is secret"}, status=status)
        body = {"choices": [{"message": {"content": "hold"}}]}
        return web.json_response(body, headers={"x-model-version": next(versions)})

    monkeypatch.setattr(pinned_calls, "PAUSE_S", 0)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    async with table_at(store, app) as table:
        one = [[{"role": "user", "content": "secret"}]], [1]
        assert await table.answers(7, *one) == ["hold"]
        with pytest.raises(ServingError, match="policy 5 answered for babylon-v7"):
            await table.answers(7, *one)
        with pytest.raises(ServingError, match=r"policy 7 does not answer .*\(400\)") as refused:
            await table.answers(7, *one)
    assert "secret" not in str(refused.value)


@asynccontextmanager
async def table_at(store: Store, app: web.Application) -> AsyncIterator[EngineTable]:
    async with TestServer(app, host="127.0.0.1") as server, pinned_calls.session() as session:
        yield EngineTable(
            store=store,
            model="babylon",
            gateways=[GatewayRow(gateway_id="g", url=str(server.make_url("")), route_version=1)],
            keys=["key"],
            session=session,
            rooms=[asyncio.Semaphore(engine_players.AT_ONCE)],
        )


async def test_replies_without_their_tokens_are_an_error(store: Store) -> None:
    async def complete(request: web.Request) -> web.Response:
        body = {"choices": [{"text": "hold", "finish_reason": "stop"}]}
        return web.json_response(body, headers={"x-model-version": "7"})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    draw = ReplyDraw(point=0, prompt=(1,), max_tokens=4, temperature=1.0, seed=1)
    async with table_at(store, app) as table:
        with pytest.raises(ServingError, match="policy 7 answers without token ids"):
            await engine_replies(table, 7, [], [draw])
