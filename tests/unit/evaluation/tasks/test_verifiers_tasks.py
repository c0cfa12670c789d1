import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import verifiers.v1 as vf
from aiohttp import web
from aiohttp.test_utils import TestServer
from openai import AsyncOpenAI

from babylon.core.errors import ArenaError
from babylon.evaluation.tasks.evaluator import Endpoint
from babylon.evaluation.tasks.verifiers_tasks import VerifiersTasks
from tests.unit.evaluation.tasks.orders_taskset import OrdersTaskset

# verifiers 0.4 calls tenacity 9.2 so.
pytestmark = pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning")
KEY = "the-gateways-key"


@pytest.fixture(autouse=True)
def the_tool_server_finds_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))


@asynccontextmanager
async def endpoint(seen: list[dict]) -> AsyncIterator[AsyncOpenAI]:
    """An endpoint whose policy ``uses`` the tool and repeats its result, ``guesses`` or fails."""

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append({"key": request.headers["Authorization"], **body})
        if body["model"] == "fails":
            raise web.HTTPBadRequest(text='{"error": {"message": "no such policy"}}')
        last = body["messages"][-1]
        message: dict = {"role": "assistant", "content": "shipped"}
        if last["role"] == "tool":
            message["content"] = f"It is {last['content']}."
        elif body["model"] == "uses":
            arguments = json.dumps({"order": int(last["content"].split()[-1][:-1])})
            function = {"name": body["tools"][0]["function"]["name"], "arguments": arguments}
            call = {"id": "c1", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 1,
                "model": body["model"],
                "choices": [choice],
                "usage": usage,
            }
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    async with TestServer(app) as server:  # noqa: SIM117
        async with AsyncOpenAI(base_url=str(server.make_url("/v1")), api_key=KEY) as client:
            yield client


@pytest.mark.slow
async def test_a_policy_that_uses_the_tasksets_tool_beats_one_that_guesses() -> None:
    tasks = VerifiersTasks(OrdersTaskset(vf.TasksetConfig()), lowest=0, highest=1)
    drawn = tasks.worlds("s", 100, [])
    worlds = [next(one for one in drawn if one.data.order % 3 == rest) for rest in (0, 1)]
    seen: list[dict] = []
    async with endpoint(seen) as client:
        scores = {
            name: [
                (await tasks.play(world, Endpoint(client=client, model=name), 7)).value
                for world in worlds
            ]
            for name in ("guesses", "uses")
        }
    assert scores == {"guesses": [1, 0], "uses": [1, 1]}
    assert {one["key"] for one in seen} == {f"Bearer {KEY}"}
    assert all(one["max_tokens"] == 256 and one["seed"] == 7 for one in seen)


def test_the_seed_chooses_the_tasks() -> None:
    tasks = VerifiersTasks(OrdersTaskset(vf.TasksetConfig()), lowest=0, highest=1)
    first, again, other = (
        [one.data.order for one in tasks.worlds(seed, 12, [])] for seed in ("s", "s", "t")
    )
    assert first == again != other
    assert len(tasks.worlds("s", 1000, [])) == 100


@pytest.mark.slow
async def test_an_endpoint_that_fails_is_no_low_score() -> None:
    tasks = VerifiersTasks(OrdersTaskset(vf.TasksetConfig()), lowest=0, highest=1)
    async with endpoint([]) as client:
        with pytest.raises(ArenaError, match="OrdersTaskset ended with ProviderError"):
            await tasks.play(tasks.worlds("s", 1, [])[0], Endpoint(client=client, model="fails"), 1)
