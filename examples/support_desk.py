"""A support desk as a task of its own: a model that guesses learns which tool solves a ticket."""

import asyncio
from random import Random

from babylon import load_settings
from babylon.core.trajectories import Call, TrainingRow
from babylon.evaluation.tasks.evaluator import PlayScore
from babylon.ops.local_play import local_play
from babylon.ops.prefect_env import prepare_inline_run
from babylon.training.base_model import resolve_base
from babylon.training.sft import fine_tune

TOOLS = {"Where is my parcel?": "track", "I want my money back.": "refund", "It broke.": "replace"}
ASKS = {ticket: ({"role": "user", "content": ticket},) for ticket in TOOLS}
NOBODY = dict.fromkeys(["trajectory_id", "agent_id", "scenario_id"], "")
SETTINGS = {"evaluation": {"evaluator": "support_desk:Desk"}, "scoring": {"scorer": "feedback"}}
SETTINGS["training"] = {"tuning": "full", "learning_rate": 1e-3, "iterations": 4}


async def answer(client, ticket, **more):
    more |= {"max_tokens": 8, "temperature": 0.5}  # steadier than the base model was taught
    got = await client.chat.completions.create(messages=ASKS[ticket], **more)
    return got.id, got.choices[0].message.content


class Desk:  # the evaluator: a world is a ticket, whose tool is known
    unit, lowest, highest, guardrails = "solved tickets", 0.0, 1.0, {}
    worlds = staticmethod(lambda seed, count, recorded: Random(seed).choices([*TOOLS], k=count))

    async def play(self, ticket, policy, seed):
        _, tool = await answer(policy.client, ticket, model=policy.model, seed=seed)
        return PlayScore(value=float(tool == TOOLS[ticket]), malformed=tool not in TOOLS.values())


async def shift(client, recorder, agent, hour):  # five tickets, the same as seven other agents
    table, at, act = f"table-{agent % 8}", f"{hour}:00+00:00", {"action_type": "TOOL"}
    async with recorder.trajectory(f"agent-{agent}", table, at=at) as play:
        for ticket in Random(f"{hour}{table}").choices([*TOOLS], k=5):
            call, tool = await answer(client, ticket, model="babylon", extra_headers=play.headers)
            await play.step(calls=[call], reward=float(tool == TOOLS[ticket]), action=act, at=at)


async def main(models):
    SETTINGS["model"] = {"base": str(base := models / "desk")}
    if not base.exists():  # make a base model that knows the tools, not what they solve
        said = [Call(step=0, messages=m, response=r) for m in ASKS.values() for r in TOOLS.values()]
        rows = [TrainingRow(calls=(call,), score=0.0, **NOBODY) for call in said * 170]
        fine_tune(resolve_base(None, models, 0), rows, base, tuning="full", batch_size=8)
    async with local_play(**SETTINGS) as desk:
        for hour in [f"2026-01-01T0{number}:00" for number in range(4)]:
            await asyncio.gather(*(shift(*desk, agent, hour) for agent in range(64)))
            print(hour, (done := await train_window(hour, SETTINGS)).status, done.reason)


if __name__ == "__main__":
    prepare_inline_run(load_settings().home, load_settings().prefect)
    from babylon.flows.train_window import train_window  # after Prefect's environment is set

    asyncio.run(main(load_settings().home.models))
