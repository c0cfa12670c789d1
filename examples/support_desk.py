"""A support desk as a task of its own: a model that guesses learns which tool solves a ticket."""

import asyncio
import os
from itertools import product
from random import Random

from babylon import load_settings
from babylon.core.trajectories import Call, TrainingRow
from babylon.evaluation.tasks.evaluator import PlayScore
from babylon.ops.local_play import local_play
from babylon.ops.prefect_env import prepare_inline_run
from babylon.training.base_model import resolve_base
from babylon.training.sft import fine_tune

TOOLS = {"Where is my parcel?": "track", "I want my money back.": "refund", "It broke.": "replace"}
NOBODY = {"trajectory_id": "", "agent_id": "", "scenario_id": "", "score": 0.0}
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
        return PlayScore(value=float(tool == TOOLS[ticket]), malformed=tool not in TOOLS.values())


async def shift(client, recorder, agent, hour):  # five tickets, the same as seven other agents
    table, at, act = f"table-{agent % 8}", f"{hour}:00+00:00", {"action_type": "TOOL"}
    async with recorder.trajectory(f"agent-{agent}", table, at=at) as play:
        for ticket in Random(f"{hour}{table}").choices([*TOOLS], k=5):
            call, tool = await answer(client, "babylon", ticket, extra_headers=play.headers)
            await play.step(calls=[call], reward=float(tool == TOOLS[ticket]), action=act, at=at)


async def main(settings, hours):
    prepare_inline_run(settings.home, settings.prefect)  # before Prefect is imported
    from babylon.flows.train_window import train_window

    models = settings.home.models
    os.environ["BASE_MODEL"] = str(base := models / "desk")
    if not base.exists():  # make a base model that knows the tools, not what they solve
        guesses = Random(0).choices([*product(TOOLS, TOOLS.values())], k=1500)
        asks = [(({"role": "user", "content": ticket},), tool) for ticket, tool in guesses]
        calls = [Call(step=0, messages=ask, response=tool) for ask, tool in asks]
        rows = [TrainingRow(calls=(call,), **NOBODY) for call in calls]
        fine_tune(resolve_base(None, models, 0), rows, base, tuning="full", batch_size=8)
    async with local_play() as desk:
        for hour in [f"2026-01-01T{number:02}:00" for number in range(hours)]:
            await asyncio.gather(*(shift(*desk, agent, hour) for agent in range(64)))
            result = await train_window(hour)
            print(hour, result.status, result.reason, flush=True)


if __name__ == "__main__":
    asyncio.run(main(load_settings(), int(os.environ.get("HOURS", "4"))))
