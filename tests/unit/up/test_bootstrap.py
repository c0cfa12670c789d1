"""A Prefect server whose database is locked for a moment does not end ``babylon up``."""

from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from babylon.errors import ServingError
from babylon.up import bootstrap

Answer = Callable[[web.Request], Awaitable[web.Response]]


async def ask(answer: Answer) -> object:
    application = web.Application()
    application.router.add_get("/", answer)
    async with TestServer(application) as server, aiohttp.ClientSession() as http:
        return await bootstrap._call(http, "GET", str(server.make_url("/")))


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_BUSY_S", (0, 0))


async def test_busy_is_asked_again() -> None:
    answers = [web.Response(status=503), web.Response(status=503), web.json_response({"a": 1})]

    async def answer(_request: web.Request) -> web.Response:
        return answers.pop(0)

    assert await ask(answer) == {"a": 1}


@pytest.mark.parametrize(("status", "asked"), [(503, 3), (422, 1)])
async def test_a_refusal_is_an_error(status: int, asked: int) -> None:
    requests = []

    async def answer(request: web.Request) -> web.Response:
        requests.append(request)
        return web.Response(status=status, text="no")

    with pytest.raises(ServingError, match=f"{status} no"):
        await ask(answer)
    assert len(requests) == asked
