"""Full models that take turns, with a vLLM that only remembers whose weights are in."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest

from babylon.serving.gateway.asgi import Receive, Response, Scope, Send
from babylon.serving.vllm.guard.babylon_turns import TakesTurns

CHAT = "/v1/chat/completions"


class Vllm:
    """The application and its engine. A call answers the weights, which stay while it runs."""

    def __init__(self) -> None:
        self.weights, self.loads = "first", list[str]()
        self.running, self.paused, self.cache_is_free = 0, False, True
        self.call_s = 0.0

    async def pause_generation(self, mode: str) -> None:
        assert (mode, self.running) == ("wait", 0)
        self.paused = True

    async def collective_rpc(self, method: str, kwargs: dict[str, str]) -> None:
        assert (method, self.paused) == ("reload_weights", True)
        self.weights = "neither"
        await asyncio.sleep(0.001)
        if "broken" in kwargs["weights_path"]:
            raise OSError("no such weights")
        self.weights = kwargs["weights_path"]
        self.loads.append(self.weights)

    async def reset_prefix_cache(self) -> bool:
        return self.cache_is_free

    async def resume_generation(self) -> None:
        self.paused = False

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        before, self.running = self.weights, self.running + 1
        try:
            await asyncio.sleep(self.call_s)
            assert (self.weights, self.paused) == (before, False) or scope["path"] != CHAT
        finally:
            self.running -= 1
        await Response(send).whole(f"{scope['path']} {before}".encode())


def client_of(vllm: Vllm) -> httpx.AsyncClient:
    turns = TakesTurns(vllm.answer)
    app = SimpleNamespace(state=SimpleNamespace(engine_client=vllm))

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await turns({**scope, "app": app}, receive, send)

    transport = httpx.ASGITransport(application)
    return httpx.AsyncClient(transport=transport, base_url="http://vllm")


async def offer(client: httpx.AsyncClient, *names: str) -> None:
    for name in names:
        await client.put(f"/policies/{name}", json={"path": f"/checkpoints/{name}"})


async def test_each_call_gets_the_weights_of_its_path_and_no_two_models_run_together() -> None:
    vllm = Vllm()
    vllm.call_s = 0.002
    async with client_of(vllm) as client:
        await offer(client, "a", "b", "c")

        async def ask(number: int) -> None:
            name = "abc"[number % 3]
            answer = await client.post(f"/policies/{name}{CHAT}")
            assert answer.text == f"{CHAT} /checkpoints/{name}"

        await asyncio.gather(*(ask(number) for number in range(60)))
    assert len(vllm.loads) < 20  # calls of one model share a turn


async def test_a_name_may_have_slashes() -> None:
    vllm = Vllm()
    async with client_of(vllm) as client:
        await offer(client, "org", "org/name-v1")
        for name in ("org", "org/name-v1"):
            answer = await client.post(f"/policies/{name}{CHAT}")
            assert answer.text == f"{CHAT} /checkpoints/{name}"
        await client.delete("/policies/org/name-v1")
        assert (
            await client.post(f"/policies/org/name-v1{CHAT}")
        ).text != f"{CHAT} /checkpoints/org"
        assert (await client.post(f"/policies/other/name{CHAT}")).status_code == 404


async def test_a_busy_model_leaves_its_turn_to_one_that_waits() -> None:
    vllm = Vllm()
    vllm.call_s = 0.002
    async with client_of(vllm) as client:
        await offer(client, "a", "b")
        done = asyncio.Event()

        async def busy() -> None:
            while not done.is_set():
                await client.post(f"/policies/a{CHAT}")

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(busy())
            await asyncio.sleep(0.02)
            async with asyncio.timeout(5):
                answer = await client.post(f"/policies/b{CHAT}")
            done.set()
    assert answer.text.endswith("/b")


async def test_a_caller_that_leaves_while_it_waits_holds_nobody_up() -> None:
    vllm = Vllm()
    vllm.call_s = 0.5  # a busy machine must cancel before it ends
    async with client_of(vllm) as client:
        await offer(client, "a", "b")
        first = asyncio.create_task(client.post(f"/policies/a{CHAT}"))
        await asyncio.sleep(0.03)  # longer than the turn
        leaving = asyncio.create_task(client.post(f"/policies/b{CHAT}"))
        await asyncio.sleep(0.001)
        second = asyncio.create_task(client.post(f"/policies/a{CHAT}"))
        await asyncio.sleep(0.001)
        leaving.cancel()
        async with asyncio.timeout(5):
            assert (await first).text.endswith("/a")
            assert (await second).text.endswith("/a")
    assert vllm.loads == ["/checkpoints/a"]


@pytest.mark.parametrize("fault", ["weights", "cache"])
async def test_after_a_failed_load_the_next_call_loads_its_own_weights(fault: str) -> None:
    vllm = Vllm()
    async with client_of(vllm) as client:
        await offer(client, "a", "b", "broken")
        await client.post(f"/policies/a{CHAT}")
        vllm.cache_is_free = fault != "cache"
        asked = "broken" if fault == "weights" else "b"
        with pytest.raises((OSError, RuntimeError)):  # vLLM's handler answers it with 500
            await client.post(f"/policies/{asked}{CHAT}")
        vllm.cache_is_free = True
        assert (await client.post(f"/policies/a{CHAT}")).text.endswith("/a")
        assert not vllm.paused


async def test_models_are_listed_and_forgotten_and_nothing_samples_without_a_name() -> None:
    vllm = Vllm()
    async with client_of(vllm) as client:
        await offer(client, "a")
        listed = (await client.get("/policies")).json()
        assert listed == {"data": [{"id": "a", "root": "/checkpoints/a"}]}
        assert (await client.post("/policies/a/tokenize")).text == "/tokenize first"
        assert (await client.get("/health")).text == "/health first"
        assert (await client.post(CHAT)).status_code == 404
        assert (await client.post(f"/policies/b{CHAT}")).status_code == 404
        await client.delete("/policies/a")
        assert (await client.post(f"/policies/a{CHAT}")).status_code == 404
    assert vllm.loads == []
