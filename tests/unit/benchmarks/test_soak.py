from aiohttp import web
from aiohttp.test_utils import TestServer
from openai import AsyncOpenAI

from babylon.evaluation.tasks.evaluator import Endpoint
from babylon.evaluation.tasks.task_match import play_task
from benchmarks.soak.coin import Coin


async def test_two_of_three_challengers_win_by_lot_whatever_the_policies_are_called() -> None:
    async def complete(_: web.Request) -> web.Response:
        return web.json_response({"id": "1", "object": "chat.completion", "choices": []})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    rulings = []
    async with (
        TestServer(app) as server,
        AsyncOpenAI(base_url=str(server.make_url("/v1")), api_key="none") as client,
    ):
        for gate in range(24):
            coin = Coin()
            champion, challenger = (
                Endpoint(client=client, model=f"babylon-v{version}") for version in (gate, gate + 1)
            )
            match = await play_task(coin, champion, challenger, coin.worlds(f"{gate}", 2048, []))
            rulings.append(match.ruling)
    assert 10 <= rulings.count("promote") <= 22 and {*rulings} == {"promote", "insufficient"}
