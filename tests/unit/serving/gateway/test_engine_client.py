"""Destination of a call, and recipients of the home's secret."""

from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from babylon.serving.gateway.engine_client import EngineClient, EngineDownError
from babylon.serving.gateway.engine_connections import EngineConnections
from babylon.serving.gateway.route_table import Target


@pytest.fixture
async def engine() -> AsyncIterator[TestServer]:
    """Lists a policy of its own and one of a server elsewhere; answers with what it was sent."""

    async def models(request: web.Request) -> web.Response:
        elsewhere = {"url": f"{request.url.origin()}/elsewhere", "foreign": True}
        return web.json_response(
            {"data": [{"id": "own", "slots": 7}, {"id": "other", **elsewhere}]}
        )

    async def answer(request: web.Request) -> web.Response:
        return web.json_response([request.path, request.headers.get("Authorization")])

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/{path:.*}", answer)
    async with TestServer(app) as server:
        yield server


async def test_a_server_that_is_not_ours_does_not_see_the_secret(engine: TestServer) -> None:
    with closing(EngineConnections()) as connections:
        client = EngineClient(connections, str(engine.make_url("")).rstrip("/"), "secret")
        assert await client.policies() == {"own", "other"}
        seen: dict[str, Any] = {}
        for name in ("own", "other"):
            async with await client.call("/tokenize", b"{}", name) as response:
                seen[name] = msgspec.json.decode(await response.read())
    assert seen == {"own": ["/tokenize", "Bearer secret"], "other": ["/elsewhere/tokenize", None]}
    assert (client.slots("own"), client.slots("other"), client.slots("unknown")) == (7, None, None)


@pytest.mark.parametrize("broken", [1, 9])
async def test_one_connection_that_fails_is_no_silence(broken: int) -> None:
    left = broken

    async def models(request: web.Request) -> web.Response:
        nonlocal left
        left -= 1
        if left >= 0:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"data": [{"id": "own"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server:
        connections = EngineConnections()
        client = EngineClient(connections, str(server.make_url("")).rstrip("/"))
        if broken == 1:
            assert await client.policies() == {"own"}
        else:
            with pytest.raises(EngineDownError):
                await client.policies()
        connections.close()


@pytest.mark.parametrize(
    "body", ["<html>welcome</html>", '{"data": 5}', '{"data": [{"id": 1}]}', "[" * 100_000]
)
async def test_what_answers_in_an_engines_place_is_no_engine(body: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        with closing(EngineConnections()) as connections:
            client = EngineClient(connections, str(server.make_url("")).rstrip("/"))
            with pytest.raises(EngineDownError, match=r"GET /v1/models .* is no engine"):
                await client.policies()
            if body.startswith("<"):
                with pytest.raises(EngineDownError, match=r"PUT /policies/v1 .* is no engine"):
                    await client.load(Target("v1", 1, "/1"))
