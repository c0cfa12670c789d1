"""A support desk as a task of its own: a model that guesses learns which tool solves a ticket."""

import asyncio
import os
from datetime import UTC, datetime
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

TICKETS = {"Where is my parcel?": "track", "It has not arrived.": "track"}
TICKETS |= {"I want my money back.": "refund", "You charged me twice.": "refund"}
TICKETS |= {"The cup is broken.": "replace", "It is the wrong size.": "replace"}
TOOLS = sorted(set(TICKETS.values()))
os.environ |= {"EVALUATOR": "support_desk:Desk", "SCORER": "feedback", "TUNING": "full"}
os.environ |= {"ITERATIONS": "6", "ARENA_SCENARIOS": "256", "WINDOW_GRACE_SECONDS": "0"}


async def answer(client, model, ticket, **more):
    """Let the model name a tool; return the call's id and the tool."""
    ask = [{"role": "user", "content": ticket}]
    got = await client.chat.completions.create(model=model, messages=ask, max_tokens=8, **more)
    return got.id, got.choices[0].message.content


class Desk:
    """The evaluator: a world is a ticket, whose tool is known."""

    unit, lowest, highest, guardrails = "solved tickets", 0.0, 1.0, {}

    def worlds(self, seed, count, recorded):
        return Random(seed).choices([*TICKETS], k=count)

    async def play(self, ticket, policy, seed):
        _, tool = await answer(policy.client, policy.model, ticket, seed=seed)
        return PlayScore(value=float(tool == TICKETS[ticket]), malformed=tool not in TOOLS)


async def shift(client, recorder, agent, hour):
    """Answer five tickets, the same ones as seven other agents, and record them over HTTP."""
    table, at, action = f"table-{agent % 8}", hour.isoformat(), {"action_type": "TOOL"}
    async with recorder.trajectory(f"agent-{agent}", table, at=at) as play:
        for ticket in Random(f"{hour}{table}").choices([*TICKETS], k=5):
            call, tool = await answer(client, "babylon", ticket, extra_headers=play.headers)
            solved = tool == TICKETS[ticket]
            await play.step(calls=[call], reward=solved / 5, action=action, at=at)


def teach_to_guess(base, target):
    """Make the base model: it knows the tools, and nothing of what they solve."""
    random, rows = Random(0), []
    for number in range(1500):
        ask = {"role": "user", "content": random.choice([*TICKETS])}
        call = Call(step=0, messages=(ask,), response=random.choice(TOOLS))
        ids = {"trajectory_id": str(number), "agent_id": "", "scenario_id": ""}
        rows.append(TrainingRow(**ids, score=0.0, calls=(call,)))
    fine_tune(base, rows, target, tuning="full", batch_size=8)


async def main(hours):
    home = load_settings().home
    base = home.models / "desk"
    if not base.exists():
        teach_to_guess(resolve_base(None, home.models, 0), base)
    os.environ["BASE_MODEL"] = str(base)
    settings = load_settings()
    async with open_store(settings) as store:
        await ensure_champion(store, home, settings.model, 0)
        async with serving(settings.serving, home, settings.environment()) as running:
            key = (home.root / "local.key").read_text().strip()
            client = AsyncOpenAI(base_url=running.url, api_key=key)
            async with client, AsyncPlayClient(running.url.removesuffix("/v1"), key) as recorder:
                for number in range(hours):
                    hour = datetime(2026, 1, 1, number, tzinfo=UTC)
                    await asyncio.gather(*(shift(client, recorder, n, hour) for n in range(64)))
                    result = await train_window(f"{hour:%Y-%m-%dT%H:%M}")
                    print(f"{hour:%H:%M} {result.status}: {result.reason}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(hours=int(os.environ.get("HOURS", "4"))))
