"""A task with a tool, recorded over HTTP only: asked for a price, the agent should call ``price``.

``python examples/tool_task.py`` plays 60 tasks with the policy that serves. After the window's end,
``babylon train --scorer feedback --min-actions 1`` trains on them: a task is one step.
"""

import argparse
import asyncio
from collections.abc import Sequence
from statistics import fmean

from openai import AsyncOpenAI

from babylon import AsyncPlayClient, load_settings

TICKERS = ("NVDA", "AAPL", "MSFT", "AMZN", "TSLA", "META")
AT_ONCE = 32  # tasks; clients give up connections that a busy machine makes wait
TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "The price of a ticker.",
        "parameters": {"type": "object", "properties": {"ticker": {"type": "string"}}},
    },
}


async def play_task(
    policy: AsyncOpenAI, client: AsyncPlayClient, task: str, agent: str, at: str | None = None
) -> float:
    """Play one task as one trajectory; return its reward: 1 for one call and no word, else 0."""
    async with client.trajectory(agent, "prices", at=at) as play:
        answer = await policy.chat.completions.create(
            model="babylon",
            messages=[{"role": "user", "content": f"What does a share of {task} cost?"}],
            tools=[TOOL],
            max_tokens=24,
            extra_headers=play.headers,
        )
        message = answer.choices[0].message
        called = [call.function.name for call in message.tool_calls or ()]
        reward = float(called == ["price"] and not (message.content or "").strip())
        action = {"action_type": "CALL_TOOL" if called else "RESPONSE", "success": reward > 0}
        await play.step(calls=[answer.id], action=action, reward=reward, at=at)
    return reward


async def play_tasks(
    endpoint: str, key: str, tasks: Sequence[str], agents: int, at: str | None = None
) -> list[float]:
    """Let each agent play each task; return the rewards."""
    policy, room = AsyncOpenAI(base_url=f"{endpoint}/v1", api_key=key), asyncio.Semaphore(AT_ONCE)
    async with AsyncPlayClient(endpoint, key) as client, policy:

        async def play(task: str, agent: str) -> float:
            async with room:
                return await play_task(policy, client, task, agent, at)

        return await asyncio.gather(
            *(play(task, f"agent-{number}") for task in tasks for number in range(agents))
        )


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--agents", type=int, default=10)
    settings = load_settings()
    key = (settings.home.root / "local.key").read_text().strip()
    agents = options.parse_args().agents
    rewards = asyncio.run(play_tasks(settings.serving.endpoint, key, TICKERS, agents))
    print(f"{len(rewards)} tasks, mean reward {fmean(rewards):.2f}")
