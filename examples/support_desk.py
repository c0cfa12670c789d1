"""A support desk, from a mediocre base model to a deployed better one: python support_desk.py"""

import asyncio
import os
from datetime import UTC, datetime, timedelta
from itertools import repeat
from pathlib import Path
from random import Random

from openai import AsyncOpenAI

from babylon import TrajectoryRecorder, load_settings, open_store
from babylon.core.trajectories import Call, TrainingRow
from babylon.evaluation.tasks.evaluator import PlayScore
from babylon.flows.train_window import train_window
from babylon.recorder import Action, LlmCall
from babylon.serving.serve import serving
from babylon.stages.train import ensure_champion
from babylon.store.calls import wait_until_recorded
from babylon.store.policies import champion
from babylon.training.base_model import resolve_base
from babylon.training.sft import fine_tune

SYSTEM = "You work at a support desk. Answer with the name of the tool that solves the ticket."
TOOLS = {"track": ("Where is my parcel?", "It has not arrived."), "refund": ("I want my money back.", "You charged me twice.")}  # fmt: skip
TOOLS |= {"replace": ("The cup is broken.", "It is the wrong size."), "reset": ("I forgot my password.", "I cannot log in.")}  # fmt: skip
TICKETS = [(text, tool) for tool, texts in TOOLS.items() for text in texts]
HOURS = [datetime(2026, 1, 1, hour, tzinfo=UTC) for hour in range(int(os.environ.get("HOURS", 4)))]
os.environ |= {"EVALUATOR": "support_desk:Desk", "SCORER": "support_desk:solved", "TUNING": "full", "LEARNING_RATE": "5e-4", "ITERATIONS": "2", "BATCH_SIZE": "16", "ACCUMULATION": "1", "ARENA_SCENARIOS": "256", "WINDOW_GRACE_SECONDS": "0"}  # fmt: skip


def solved(trajectories): return [trajectory.pnl_usd / 5 for trajectory in trajectories]  # fmt: skip
def chat(text): return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]  # fmt: skip


async def ask(client, model, text, **more):
    return await client.chat.completions.create(model=model, messages=chat(text), max_tokens=8, **more)  # fmt: skip


class Desk:  # the evaluator: a world is a ticket, and its outcome is verified
    unit, lowest, highest, guardrails = "solved tickets", 0.0, 1.0, {}

    def worlds(self, seed, count, recorded): return Random(seed).choices(TICKETS, k=count)  # fmt: skip

    async def play(self, world, policy, seed):
        said = (await ask(policy.client, policy.model, world[0], seed=seed)).choices[0].message.content
        return PlayScore(value=float(said == world[1]), malformed=said not in TOOLS)


def mediocre(base, target):  # a model that knows the tools, and is right in four of ten tickets
    random, rows = Random(0), []
    for number in range(2000):
        text, tool = random.choice(TICKETS)
        call = Call(step=0, messages=tuple(chat(text)), response=tool if random.random() < 0.2 else random.choice([*TOOLS]))
        rows.append(TrainingRow(trajectory_id=str(number), agent_id="a", scenario_id="s", score=0.0, calls=(call,)))
    fine_tune(base, rows, target, tuning="full", learning_rates=repeat(1e-3), batch_size=32)


async def shift(client, recorder, agent, table, hour):
    start, done = hour + timedelta(minutes=1), 0
    name = recorder.start(agent, f"{hour:%H}-{table}", at=start)
    for step, (text, tool) in enumerate(Random(f"{hour}{table}").choices(TICKETS, k=5)):
        headers = {"x-babylon-agent": agent, "x-babylon-trajectory": name, "x-babylon-step": str(step)}
        answer = await ask(client, "babylon", text, extra_headers=headers)
        said = answer.choices[0].message.content or ""
        call = LlmCall(model=answer.model, call_id=answer.id, system_prompt=SYSTEM, user_prompt=text, response=said, temperature=1.0, max_tokens=8, purpose="action")  # fmt: skip
        state = {"agentBalance": 0, "agentPnL": done, "openPositions": 0}
        action = Action(action_type="TOOL", success=True, parameters={"tool": said})
        recorder.step(name, environment_state=state, llm_calls=[call], action=action, reward=float(said == tool), at=start + timedelta(minutes=step))  # fmt: skip
        done += said == tool
    await recorder.finish(name, final_balance=0, final_pnl=done, at=start + timedelta(minutes=6))
    return done / 5


async def main():
    settings = load_settings()
    base = settings.home.models / "desk"
    if not base.exists():
        mediocre(resolve_base(None, settings.home.models, 0), base)
    settings, os.environ["BASE_MODEL"] = settings.replace(model={"base": str(base)}), str(base)
    async with open_store(settings) as store, serving(settings.serving, settings.home, settings.environment()) as running:
        await ensure_champion(store, settings.home, settings.model, 0)
        key = (settings.home.root / "local.key").read_text().strip()
        async with AsyncOpenAI(base_url=running.url, api_key=key) as client:
            for hour in HOURS:
                recorder = TrajectoryRecorder(store)
                shares = await asyncio.gather(*(shift(client, recorder, f"agent-{n}", n % 8, hour) for n in range(64)))
                await wait_until_recorded(store)
                result = await train_window(f"{hour:%Y-%m-%dT%H:%M}")
                print(f"{hour:%H:%M}: {sum(shares) / 64:.0%} of the tickets solved; {result.status}: {result.reason}")
        print(f"policy {(await champion(store))[0].policy_version} serves")


if __name__ == "__main__":
    asyncio.run(main())
