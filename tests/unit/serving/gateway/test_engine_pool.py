"""Several engines behind one gateway: who gets a call, and who answers when one does not."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from babylon.core.errors import ServingError
from babylon.serving.gateway import engine_pool
from babylon.serving.gateway.engine_client import EngineClient, EngineDownError, arriving_bytes
from babylon.serving.gateway.engine_connections import EngineConnections, EngineResponse
from babylon.serving.gateway.engine_pool import EnginePool, in_order
from babylon.serving.gateway.readiness import FAILURES
from babylon.serving.gateway.route_table import Target

V1 = Target("babylon-v1", 1, "home:checkpoints/one")


@dataclass
class Engine:
    """An engine that answers with its name, and fails as told."""

    name: str
    held: set[str] = field(default_factory=set)
    refuses: bool = False
    breaks: bool = False  # after the headers of an answer, before its first byte
    frozen: asyncio.Event = field(default_factory=asyncio.Event)
    calls: int = 0
    url: str = ""

    def app(self) -> web.Application:
        self.frozen.set()  # it is not
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_put("/policies/{name}", self._load)
        app.router.add_delete("/policies/{name}", self._unload)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        await self.frozen.wait()
        return web.json_response({"data": [{"id": name} for name in self.held]})

    async def _load(self, request: web.Request) -> web.Response:
        await self.frozen.wait()
        if self.refuses:
            return web.json_response({"error": {"message": "no room"}}, status=400)
        self.held.add(request.match_info["name"])
        return web.json_response({"id": request.match_info["name"], "slots": 4})

    async def _unload(self, request: web.Request) -> web.Response:
        self.held.discard(request.match_info["name"])
        return web.Response(status=204)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.calls += 1
        await self.frozen.wait()
        if msgspec.json.decode(await request.read())["model"] not in self.held:
            return web.json_response({"error": {"message": "not loaded"}}, status=404)
        response = web.StreamResponse()
        await response.prepare(request)
        if self.breaks:
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write_eof(self.name.encode())
        return response


class Answer:
    """An open response."""

    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
async def engines() -> AsyncIterator[list[Engine]]:
    found = [Engine("a"), Engine("b"), Engine("c")]
    async with AsyncExitStack() as stack:
        for engine in found:
            server = await stack.enter_async_context(TestServer(engine.app(), host="127.0.0.1"))
            engine.url = str(server.make_url("")).rstrip("/")
        yield found
        for engine in found:
            engine.frozen.set()


@pytest.fixture
async def pool(engines: list[Engine]) -> AsyncIterator[EnginePool]:
    with closing(EngineConnections()) as connections:
        made = EnginePool(EngineClient(connections, engine.url) for engine in engines)
        made.keep([V1])
        yield made


def body(conversation: int) -> bytes:
    return msgspec.json.encode({"model": V1.name, "messages": [f"{conversation} " * 300]})


async def answer(pool: EnginePool, conversation: int = 0) -> str:
    path = "/v1/chat/completions"
    async with await pool.call_streamed(path, body(conversation), V1.name) as response:
        return b"".join([part async for part in arriving_bytes(response)]).decode()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


async def test_a_policy_is_loaded_everywhere_and_conversations_stay_where_they_are_cached(
    engines: list[Engine], pool: EnginePool
) -> None:
    await pool.load(V1)
    assert [engine.held for engine in engines] == [{V1.name}] * 3
    assert pool.slots(V1.name) == 12
    first = [await answer(pool, number) for number in range(30)]
    assert first == [await answer(pool, number) for number in range(30)]
    assert set(Counter(first)) == {"a", "b", "c"}


async def test_a_loaded_engine_hands_calls_to_the_others(pool: EnginePool) -> None:
    await pool.load(V1)
    favourite = in_order(pool.members, body(0))[0]
    favourite.running = 10
    assert in_order(pool.members, body(0))[0] is not favourite
    assert in_order(pool.members, body(0))[-1] is favourite


@pytest.mark.parametrize("fault", ["gone", "breaks", "lost"])
async def test_another_engine_answers_when_the_first_cannot(
    engines: list[Engine], pool: EnginePool, fault: str
) -> None:
    await pool.load(V1)
    name = await answer(pool)
    first = next(one for one in engines if one.name == name)
    if fault == "gone":
        pool.members[engines.index(first)].client.url = "http://127.0.0.1:9"
    elif fault == "breaks":
        first.breaks = True
    else:
        first.held.clear()
    assert {await answer(pool) for _ in range(5)} <= {one.name for one in engines} - {first.name}
    assert sum(member.running for member in pool.members) == 0


async def test_calls_that_break_do_not_take_their_engine_from_others(
    engines: list[Engine], pool: EnginePool
) -> None:
    await pool.load(V1)
    name = await answer(pool)
    place = next(number for number, one in enumerate(engines) if one.name == name)
    first, member = engines[place], pool.members[place]
    for _ in range(3 * FAILURES):
        first.breaks = True  # by what this call asks, so that the gateway's own call is answered
        breaking = asyncio.create_task(answer(pool))
        while first.breaks and not breaking.done():
            await asyncio.sleep(0)
            first.breaks = member.failed == 0
        first.breaks = False
        await breaking
        await until(lambda: not member.down.is_set() and member.held == {V1.name})
        assert await answer(pool) == name


async def test_an_engine_that_breaks_all_calls_gets_none_until_it_answers_the_gateway(
    engines: list[Engine], pool: EnginePool
) -> None:
    await pool.load(V1)
    name = await answer(pool)
    place = next(number for number, one in enumerate(engines) if one.name == name)
    first, member = engines[place], pool.members[place]
    first.breaks = True
    for _ in range(FAILURES):
        assert await answer(pool) != name
    await until(member.down.is_set)
    before = first.calls
    assert await answer(pool) != name and first.calls == before
    first.breaks = False
    assert await pool.policies() == {V1.name}
    await until(lambda: not member.down.is_set())
    assert await answer(pool) == name


async def test_a_call_leaves_an_engine_that_falls_silent_before_its_first_byte(
    engines: list[Engine], pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("babylon.serving.gateway.engine_client.ASK_S", 0.2)
    await pool.load(V1)
    name = await answer(pool)
    first = next(one for one in engines if one.name == name)
    first.frozen.clear()
    before = first.calls
    waiting = asyncio.create_task(answer(pool))
    while first.calls == before:
        await asyncio.sleep(0.01)
    assert await pool.policies() == {V1.name}  # the gateway's own question finds out
    assert await waiting != first.name


async def test_a_restarted_engine_loads_before_it_gets_calls(
    engines: list[Engine], pool: EnginePool
) -> None:
    await pool.load(V1)
    engines[0].held.clear()
    assert await pool.policies() == {V1.name}
    loading = pool.members[0].loading
    assert loading is not None
    await loading
    assert engines[0].held == {V1.name}


async def test_a_load_needs_half_of_the_engines_and_waits_little_for_the_others(
    engines: list[Engine], pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_pool, "FOLLOW_S", 0.05)
    engines[0].frozen.clear()
    await pool.load(V1)
    assert [V1.name in engine.held for engine in engines] == [False, True, True]
    engines[0].frozen.set()
    for engine in engines:
        engine.held.clear()
    engines[1].refuses = engines[2].refuses = True
    with pytest.raises(ServingError, match="no room"):
        await pool.load(Target("babylon-v2", 2, "two"))


async def test_the_slots_of_a_single_engine_are_known_again_after_its_restart(
    engines: list[Engine],
) -> None:
    with closing(EngineConnections()) as connections:
        pool = EnginePool([EngineClient(connections, "http://127.0.0.1:9")])
        with pytest.raises(EngineDownError):
            await pool.load(V1)
        pool.members[0].client.url = engines[0].url
        await pool.policies()
        await pool.load(V1)
        assert pool.slots(V1.name) == 4


async def test_a_request_that_breaks_engines_does_not_reach_all_of_them(
    engines: list[Engine], pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_pool, "TRIES", 2)
    await pool.load(V1)
    for engine in engines:
        engine.breaks = True
    with pytest.raises(EngineDownError):
        await answer(pool)
    assert sorted(engine.calls for engine in engines) == [0, 1, 1]


async def test_an_answer_that_comes_as_the_client_leaves_is_closed(
    engines: list[Engine], pool: EnginePool
) -> None:
    member, response = pool.members[0], Answer()

    async def answering() -> EngineResponse:
        leaving.cancel()
        return response  # type: ignore[return-value]

    leaving = asyncio.create_task(engine_pool._unless_down(member, answering()))
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert response.closed


async def test_without_any_engine_the_error_names_all(pool: EnginePool) -> None:
    for member in pool.members:
        member.client.url = "http://127.0.0.1:9"
    with pytest.raises(EngineDownError, match=r"none of the engines at .*9, .*9"):
        await pool.policies()
    with pytest.raises(EngineDownError):
        await answer(pool)
