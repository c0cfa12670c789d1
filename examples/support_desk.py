"""A support desk as a task of its own: a model that guesses learns which tool solves a ticket."""

import asyncio
import os
from itertools import product
from random import Random

from openai import AsyncOpenAI

from babylon import AsyncPlayClient, load_settings, open_store
from babylon.core.trajectories import Call, TrainingRow
from babylon.evaluation.tasks.evaluator import PlayScore
from babylon.flows.train_window import train_window
from babylon.serving.serve import serving
from babylon.stages.train import ensure_champion
from babylon.training.base_model import resolve_base
from babylon.training.sft import fine_tune

TOOLS = {"Where is my parcel?": "track", "I want my money back.": "refund", "It broke.": "replace"}
NOBODY = {"trajectory_id": "", "agent_id": "", "scenario_id": ""}
os.environ |= {"EVALUATOR": "support_desk:Desk", "SCORER": "feedback", "TUNING": "full"}
os.environ |= {"LEARNING_RATE": "1e-3", "ITERATIONS": "4", "WINDOW_GRACE_SECONDS": "0"}


async def answer(client, model, ticket, **more):
    ask = [{"role": "user", "content": ticket}]
    got = await client.chat.completions.create(model=model, messages=ask, max_tokens=8, **more)
    return got.id, got.choices[0].message.content


class Desk:  # the evaluator: a world is a ticket, whose tool is known
    unit, lowest, highest, guardrails = "solved tickets", 0.0, 1.0, {}
    worlds = staticmethod(lambda seed, count, recorded: Random(seed).choices([*TOOLS], k=count))

    async def play(self, ticket, policy, seed):
        _, tool = await answer(policy.client, policy.model, ticket, seed=seed)
        return PlayScore(float(tool == TOOLS[ticket]), malformed=tool not in TOOLS.values())


async def shift(client, recorder, agent, hour):  # five tickets, the same as seven other agents
    table, at, act = f"table-{agent % 8}", f"{hour}:00+00:00", {"action_type": "TOOL"}
    async with recorder.trajectory(f"agent-{agent}", table, at=at) as play:
        for ticket in Random(f"{hour}{table}").choices([*TOOLS], k=5):
            call, tool = await answer(client, "babylon", ticket, extra_headers=play.headers)
            await play.step(calls=[call], reward=float(tool == TOOLS[ticket]), action=act, at=at)


async def main(hours):
    home = load_settings().home
    os.environ["BASE_MODEL"] = str(base := home.models / "desk")
    if not base.exists():  # a base model that knows the tools, and nothing of what they solve
        guesses = Random(0).choices([*product(TOOLS, TOOLS.values())], k=1500)
        asks = [(({"role": "user", "content": ticket},), tool) for ticket, tool in guesses]
        calls = [Call(step=0, messages=ask, response=tool) for ask, tool in asks]
        rows = [TrainingRow(calls=(call,), score=0.0, **NOBODY) for call in calls]
        fine_tune(resolve_base(None, home.models, 0), rows, base, tuning="full", batch_size=8)
    settings = load_settings()
    async with open_store(settings) as store:
        await ensure_champion(store, home, settings.model, 0)
        async with serving(settings.serving, home, settings.environment()) as running:
            key = (home.root / "local.key").read_text().strip()
            client = AsyncOpenAI(base_url=running.url, api_key=key)
            async with client, AsyncPlayClient(running.url.removesuffix("/v1"), key) as recorder:
                for hour in (f"2026-01-01T{number:02}:00" for number in range(hours)):
                    await asyncio.gather(*(shift(client, recorder, n, hour) for n in range(64)))
                    print(hour, (await train_window(hour)).reason, flush=True)


if __name__ == "__main__":
    asyncio.run(main(hours=int(os.environ.get("HOURS", "4"))))
