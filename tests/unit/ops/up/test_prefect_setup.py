"""A Prefect server that refuses or is silent ends ``babylon up`` with a line that says so."""

import socket

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from babylon.core.errors import ServingError
from babylon.ops.prefect_env import PrefectApi, api_url
from babylon.ops.up import prefect_call
from babylon.ops.up.prefect_setup import create_pools


class Prefect:
    """The routes of a Prefect server that pools and their queues need."""

    def __init__(self, *existing: str, refuses: bool = False) -> None:
        self.pools = list(existing)
        self.queues = ["default"]
        self.refuses = refuses

    async def filter(self, _request: web.Request) -> web.Response:
        return web.json_response([{"name": name} for name in self.pools])

    async def create(self, request: web.Request) -> web.Response:
        if self.refuses:
            return web.Response(status=422, text="no such type")
        self.pools.append((await request.json())["name"])
        return web.json_response({}, status=201)

    async def filter_queues(self, _request: web.Request) -> web.Response:
        return web.json_response([{"name": name} for name in self.queues])

    async def create_queue(self, request: web.Request) -> web.Response:
        queue = await request.json()
        self.queues.append(f"{queue['priority']} {queue['name']}")
        return web.json_response({}, status=201)


async def create_pools_of(prefect: Prefect) -> None:
    application = web.Application()
    application.router.add_post("/api/work_pools/cpu/queues/filter", prefect.filter_queues)
    application.router.add_post("/api/work_pools/cpu/queues/", prefect.create_queue)
    application.router.add_post("/api/work_pools/filter", prefect.filter)
    application.router.add_post("/api/work_pools/", prefect.create)
    async with TestServer(application, host="127.0.0.1") as server, aiohttp.ClientSession() as http:
        await create_pools(http, PrefectApi(url=api_url(server.port or 0)))


@pytest.mark.parametrize("existing", [(), ("cpu",), ("cpu", "gpu", "somebody's")])
async def test_only_missing_pools_are_created(existing: tuple[str, ...]) -> None:
    prefect = Prefect(*existing)
    await create_pools_of(prefect)
    assert sorted(prefect.pools) == sorted({*existing, "cpu", "gpu"})
    assert prefect.queues == ["default", "1 hourly", "2 by-hand", "3 publish"]


async def test_a_refusal_is_quoted() -> None:
    with pytest.raises(ServingError, match="work_pools/: 422 no such type"):
        await create_pools_of(Prefect(refuses=True))


@pytest.mark.parametrize("listens", [False, True])
async def test_silence_names_address_remedy(listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefect_call, "TIMEOUT", aiohttp.ClientTimeout(total=0.2))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        if listens:  # and never answers
            nobody.listen()
        port = nobody.getsockname()[1]
        async with aiohttp.ClientSession() as http:
            with pytest.raises(ServingError, match=f"{port}/api.*babylon down"):
                await create_pools(http, PrefectApi(url=api_url(port)))


async def test_no_answer_is_told_without_the_password_of_the_address() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = api_url(nobody.getsockname()[1]).replace("://", "://me:sk-secret@")
        async with aiohttp.ClientSession() as http:
            with pytest.raises(ServingError, match=r"://\*+@127") as refused:
                await create_pools(http, PrefectApi(url=url))
    assert "sk-secret" not in str(refused.value)
