"""Servers in trouble: real HTTP, with vLLM's answers."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from babylon.core.processes import Service
from babylon.core.settings import ServingSettings
from babylon.serving.openai_wire import RequestError, error_body
from babylon.serving.vllm import vllm_host
from babylon.serving.vllm.vllm_client import VllmClient, VllmDownError
from babylon.serving.vllm.vllm_host import VllmFleet
from babylon.serving.vllm.vllm_server import VllmPolicy, VllmServer, read_policy

ADAPTER = VllmPolicy(name="p-v1", version=1, path="/adapters/1", base="org/base", is_adapter=True)
BASE = {"id": "ours", "root": "org/base", "parent": None}


@asynccontextmanager
async def server_with(*routes: web.RouteDef) -> AsyncIterator[VllmServer]:
    app = web.Application()
    app.add_routes(routes)
    async with TestServer(app, host="127.0.0.1") as http, aiohttp.ClientSession() as session:
        server = VllmServer(VllmClient(session, str(http.make_url("")).rstrip("/")), None)
        yield server
        await server.stop()


def answering(method: str, path: str, body: str, status: int = 200) -> web.RouteDef:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=body, status=status)

    return web.route(method, path, answer)


def models(*cards: dict[str, str | None]) -> web.RouteDef:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"data": cards})

    return web.get("/v1/models", answer)


async def test_server_without_adapter_endpoints_is_told_how_to_have_them() -> None:
    routes = [
        models(BASE),
        answering("POST", "/v1/load_lora_adapter", '{"detail":"Not Found"}', 404),
    ]
    async with server_with(*routes) as server:
        with pytest.raises(RequestError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
            await server.load(ADAPTER)
        assert server.idle


@pytest.mark.parametrize("targets", [None, ["mlp.experts.gate_up_proj"]])
async def test_an_adapter_on_experts_is_loaded_as_one(
    tmp_path: Path, targets: list[str] | None
) -> None:
    asked: list[bool] = []

    async def load(request: web.Request) -> web.Response:
        asked.append((await request.json())["is_3d_lora_weight"])
        return web.Response(text="Success")

    config = {"base_model_name_or_path": "org/base", "target_parameters": targets}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    routes = [
        models(BASE),
        web.post("/v1/load_lora_adapter", load),
        answering("POST", "/v1/chat/completions", "{}"),
    ]
    async with server_with(*routes) as server:
        await server.load(read_policy("p-v1", str(tmp_path), 1))
    assert asked == [targets is not None]


async def test_adapter_that_cannot_answer_is_refused_and_unloaded() -> None:
    unloaded: list[str] = []

    async def unload(request: web.Request) -> web.Response:
        unloaded.append((await request.json())["lora_name"])
        return web.Response()

    refusal = error_body(400, "no chat template").decode()
    routes = [
        models(BASE),
        answering("POST", "/v1/load_lora_adapter", "Success"),
        answering("POST", "/v1/chat/completions", refusal, 400),
        web.post("/v1/unload_lora_adapter", unload),
    ]
    async with server_with(*routes) as server:
        with pytest.raises(RequestError, match="/adapters/1 cannot answer: no chat template"):
            await server.load(ADAPTER)
        assert unloaded == ["p-v1"]
        assert server.idle and await server.ready() == {}


async def test_a_held_policy_that_the_server_has_lost_for_good_is_dropped() -> None:
    """The next load of the policy gets the reason."""
    held = [{"id": "p-v1", "root": "/adapters/1", "parent": "ours"}, BASE]

    async def cards(request: web.Request) -> web.Response:
        return web.json_response({"data": held})

    gone = error_body(404, "No adapter found for <path>").decode()
    routes = [
        web.get("/v1/models", cards),
        answering("POST", "/v1/load_lora_adapter", gone, 404),
        answering("POST", "/v1/chat/completions", "{}"),
    ]
    async with server_with(*routes) as server:
        await server.load(ADAPTER)
        assert await server.ready() == {"p-v1": "p-v1"}
        del held[0]
        async with asyncio.timeout(30):
            while server.policies:
                await asyncio.sleep(0.02)
        assert await server.ready() == {}
        with pytest.raises(RequestError, match="No adapter found"):
            await server.load(ADAPTER)


@pytest.mark.parametrize(
    "route",
    [
        answering("GET", "/v1/models", "<html>"),
        answering("GET", "/v1/models", '{"detail":"a key, please"}', 401),
        answering("GET", "/elsewhere", ""),
    ],
)
async def test_what_is_no_vllm_server_is_down(route: web.RouteDef) -> None:
    async with server_with(route) as server:
        with pytest.raises(VllmDownError, match=server.client.url):
            await server.load(ADAPTER)
        assert not server.up
        await server.drained()  # it answers nothing


async def test_requests_in_flight_are_those_running_and_waiting() -> None:
    metrics = (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0",model_name="a"} 2.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="a"} 3.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 3.0\n'
    )
    async with server_with(answering("GET", "/metrics", metrics)) as server:
        assert await server.client.in_flight() == 5


async def test_a_server_whose_first_model_is_deleted_ends_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not start again. A new host starts with a model that is still there."""
    ended: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", ended.append)
    async with aiohttp.ClientSession() as session:
        nobody = VllmClient(session, "http://127.0.0.1:9", turns=True)
        server = VllmServer(nobody, None, str(tmp_path / "gone"))
        async with asyncio.timeout(10):
            while not ended:
                await asyncio.sleep(0.01)
        await server.stop()
    assert ended == [signal.SIGTERM]


async def test_a_cancelled_load_leaves_no_server_without_a_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = Service(name="vLLM server", command=("sleep", "60"), log=tmp_path / "log")
    monkeypatch.setattr(vllm_host, "vllm_service", lambda *_, **__: starting)
    (tmp_path / "config.json").write_text("{}")
    given = {"logs": tmp_path, "reserved_ports": (), "secret": "", "cpu": False}
    async with aiohttp.ClientSession() as http:
        fleet = VllmFleet(http, ServingSettings(engine="vllm"), **given)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(20):
                loading = asyncio.create_task(fleet.load("p-v1", str(tmp_path), 1))
                while not fleet.describe():
                    await asyncio.sleep(0.01)
                loading.cancel()
                await asyncio.wait([loading])
                while fleet.describe():
                    await asyncio.sleep(0.01)
        finally:
            await fleet.close()


async def test_a_server_that_starts_for_longer_than_a_load_goes_on_for_the_next_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = Service(name="vLLM server", command=("sleep", "60"), log=tmp_path / "log")
    begun: list[Service] = []
    monkeypatch.setattr(
        vllm_host, "vllm_service", lambda *_, **__: begun.append(starting) or starting
    )
    monkeypatch.setattr(vllm_host, "AGAIN_S", 1.0)
    (tmp_path / "config.json").write_text("{}")
    given = {"logs": tmp_path, "reserved_ports": (), "secret": "", "cpu": False}
    async with aiohttp.ClientSession() as http:
        fleet = VllmFleet(http, ServingSettings(engine="vllm"), **given)  # type: ignore[arg-type]
        try:
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(1.5):
                        await fleet.load("p-v1", str(tmp_path), 1)
                await asyncio.sleep(0.25)
            assert len(begun) == 1
        finally:
            await fleet.close()


async def test_a_server_without_a_policy_stops_though_nobody_waits_for_the_unload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def unload(request: web.Request) -> web.Response:
        asked.set()
        await asyncio.sleep(60)
        return web.Response()

    app = web.Application()
    app.add_routes(
        [
            models(BASE),
            answering("POST", "/v1/load_lora_adapter", "Success"),
            answering("POST", "/v1/chat/completions", "{}"),
            answering("GET", "/metrics", ""),
            web.post("/v1/unload_lora_adapter", unload),
        ]
    )
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    running = Service(name="vLLM server", command=("sleep", "60"), log=tmp_path / "log")
    monkeypatch.setattr(vllm_host, "vllm_service", lambda *_, **__: running)
    given = {"logs": tmp_path, "reserved_ports": (), "secret": "", "cpu": False}
    async with TestServer(app, host="127.0.0.1") as served, aiohttp.ClientSession() as http:
        monkeypatch.setattr(vllm_host, "free_port", lambda *_: served.port)
        fleet = VllmFleet(http, ServingSettings(engine="vllm"), **given)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(20):
                await fleet.load("p-v1", str(tmp_path), 1)
                unloading = asyncio.create_task(fleet.unload("p-v1"))
                await asked.wait()
                unloading.cancel()
                await asyncio.wait([unloading])
                while fleet.describe():
                    await asyncio.sleep(0.01)
        finally:
            await fleet.close()
