"""A support desk as a task of its own: base model, agents, reward, evaluator, hourly training."""

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
TICKETS = {
    "Where is my parcel?": "track",
    "It has not arrived.": "track",
    "I want my money back.": "refund",
    "You charged me twice.": "refund",
    "The cup is broken.": "replace",
    "It is the wrong size.": "replace",
    "I forgot my password.": "reset",
    "I cannot log in.": "reset",
}
TOOLS = sorted(set(TICKETS.values()))
RECIPE = {
    **{"EVALUATOR": "support_desk:Desk", "SCORER": "support_desk:solved", "TUNING": "full"},
    **{"LEARNING_RATE": "5e-4", "ITERATIONS": "2", "BATCH_SIZE": "16", "ACCUMULATION": "1"},
    **{"ARENA_SCENARIOS": "256", "WINDOW_GRACE_SECONDS": "0"},
}


def solved(trajectories):
    """The reward: share of a shift's five tickets that were solved."""
    return [trajectory.pnl_usd / 5 for trajectory in trajectories]


def chat(text):
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


async def ask(client, model, text, **more):
    return await client.chat.completions.create(
        model=model, messages=chat(text), max_tokens=8, **more
    )


class Desk:
    """The evaluator: a world is a ticket, whose tool is known."""

    unit, lowest, highest, guardrails = "solved tickets", 0.0, 1.0, {}

    def worlds(self, seed, count, recorded):
        return Random(seed).choices([*TICKETS], k=count)

    async def play(self, world, policy, seed):
        answer = await ask(policy.client, policy.model, world, seed=seed)
        said = answer.choices[0].message.content
        return PlayScore(value=float(said == TICKETS[world]), malformed=said not in TOOLS)


def mediocre(base, target, chats=3000):
    """Make a model that knows the tools and is right in four of ten tickets."""
    random, rows = Random(0), []
    for number in range(chats):
        text, tool = random.choice([*TICKETS.items()])
        said = tool if random.random() < 0.2 else random.choice(TOOLS)
        call = Call(step=0, messages=tuple(chat(text)), response=said)
        row = {"trajectory_id": str(number), "agent_id": "a", "scenario_id": "s", "score": 0.0}
        rows.append(TrainingRow(**row, calls=(call,)))
    fine_tune(base, rows, target, tuning="full", learning_rates=repeat(2e-3), batch_size=16)


async def shift(client, recorder, agent, table, hour):
    """Answer five tickets, the same ones for all agents of a table, and record them."""
    done = 0
    name = recorder.start(agent, f"{hour:%H}-{table}", at=hour)
    for step, text in enumerate(Random(f"{hour}{table}").choices([*TICKETS], k=5)):
        told = {"x-babylon-agent": agent, "x-babylon-trajectory": name, "x-babylon-step": str(step)}
        answer = await ask(client, "babylon", text, extra_headers=told)
        said = answer.choices[0].message.content or ""
        prompts = {"system_prompt": SYSTEM, "user_prompt": text, "response": said}
        limits = {"temperature": 1.0, "max_tokens": 8, "purpose": "action"}
        call = LlmCall(model=answer.model, call_id=answer.id, **prompts, **limits)
        right = said == TICKETS[text]
        recorder.step(
            name,
            environment_state={"agentBalance": 0, "agentPnL": done, "openPositions": 0},
            llm_calls=[call],
            action=Action(action_type="TOOL", success=True, parameters={"tool": said}),
            reward=float(right),
            at=hour + timedelta(minutes=step),
        )
        done += right
    await recorder.finish(name, final_balance=0, final_pnl=done, at=hour + timedelta(minutes=5))
    return done / 5


async def work_and_learn(store, client, hour):
    recorder = TrajectoryRecorder(store)
    agents = (shift(client, recorder, f"agent-{n}", n % 8, hour) for n in range(64))
    shares = await asyncio.gather(*agents)
    await wait_until_recorded(store)
    result = await train_window(f"{hour:%Y-%m-%dT%H:%M}")
    print(f"{hour:%H:%M} {sum(shares) / 64:.0%} solved; {result.status}: {result.reason}")


async def main(hours):
    os.environ.update(RECIPE)
    home = load_settings().home
    base = home.models / "desk"
    if not base.exists():
        mediocre(resolve_base(None, home.models, 0), base)
    os.environ["BASE_MODEL"] = str(base)
    settings = load_settings()
    async with (
        open_store(settings) as store,
        serving(settings.serving, home, settings.environment()) as running,
    ):
        await ensure_champion(store, home, settings.model, 0)
        key = Path(home.root, "local.key").read_text().strip()
        async with AsyncOpenAI(base_url=running.url, api_key=key) as client:
            for hour in range(hours):
                await work_and_learn(store, client, datetime(2026, 1, 1, hour, tzinfo=UTC))
        print(f"policy {(await champion(store))[0].policy_version} serves")


if __name__ == "__main__":
    asyncio.run(main(hours=int(os.environ.get("HOURS", "4"))))
