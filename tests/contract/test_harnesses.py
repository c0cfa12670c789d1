"""The programs in examples/agents: harnesses as they are, each call of theirs trained exactly.

`make test-harnesses` runs them in an environment of their own: their versions collide with ours.
"""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import torch

from babylon.core.api_keys import local_key
from babylon.core.settings import Settings
from babylon.policies.load import load_policy
from babylon.store import Store
from babylon.store.calls import wait_until_recorded
from tests.calling_policy import END, save_calling_policy
from tests.contract.engines import (
    PATIENCE_S,
    VLLM_PYTHON,
    host_settings,
    running_embedded,
    running_host,
)
from tests.integration.test_play import LAST_HOUR
from tests.integration.test_play_learning import assert_higher, learning, trained_on_last_hour
from tests.integration.test_serving import register, route_to, running_gateway, until_healthy
from tests.tiny_policy import plain_logprobs

PYTHON = os.environ.get("HARNESS_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs `make test-harnesses`")
ROOT = Path(__file__).parents[2]
ROW = re.compile(
    r"^\|[^|]*\|[^|]*\| (?P<names>`.*`) \| `(?P<program>examples/agents/.*)` \|$", re.M
)
AGENTS = "agno", "haystack", "langgraph", "openai-agents", "pydantic-ai", "smolagents"
CALLS = [
    f'<tool_call>\n{{"name": "buy", "arguments": {{"ticker": "{ticker}"}}}}\n</tool_call>'
    for ticker in ("NVDA", "TSLA")
]
CONTEXT = 32768  # the prompts of smolagents have 7,000 tokens of one byte
SAY = "I bought it."
FIRST = dict.fromkeys(CALLS, 0.4) | {SAY: 0.2}
LATER = {END: 1.0}
PLAYED_S = 3000
SEEN, UNSEEN = 120, 960  # orders: an update of 0.03 nats a token earns about a tenth
LEARNERS = os.environ.get("HARNESSES", "agno,langgraph,openai-agents").split(",")  # the dialects


@asynccontextmanager
async def gateway(store: Store, settings: Settings, checkpoint: Path) -> AsyncIterator[str]:
    """Yield the URL of a gateway before an engine that serves the checkpoint."""
    await register(store, [checkpoint])
    host = host_settings(
        *(settings.home.root, Path()),
        database_url=settings.database.url,
        vllm_args=f"--dtype float32 --enforce-eager --max-model-len {CONTEXT}",
    )
    with running_host(host) if VLLM_PYTHON else running_embedded() as engine_url:
        async with running_gateway(store, settings, engine_url) as url:
            await until_healthy(url, timeout_s=PATIENCE_S)
            yield url


def variables_of(agent: str, url: str, key: str) -> tuple[str, dict[str, str]]:
    """The program of an agent, and the variables that docs/agents.md names for it."""
    name = f"examples/agents/with_{agent.replace('-', '_')}.py"
    rows = {row["program"]: row for row in ROW.finditer((ROOT / "docs" / "agents.md").read_text())}
    values = {
        "OPENAI_API_KEY": key,
        "ANTHROPIC_API_KEY": key,
        "OPENAI_BASE_URL": f"{url}/v1",
        "ANTHROPIC_BASE_URL": url,
    }
    return name, {name: values[name] for name in rows[name]["names"].strip("`").split("` `")}


async def played(agent: str, url: str, key: str, *options: str) -> list[dict[str, Any]]:
    """Run a program, and return what it printed: a trajectory and its reward a line."""
    name, variables = variables_of(agent, url, key)
    quiet = {"HAYSTACK_TELEMETRY_ENABLED": "False", "PYTHONPATH": ""}
    program = await asyncio.create_subprocess_exec(
        *(PYTHON or "", str(ROOT / name), *options),
        env={**os.environ, **variables, **quiet},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PLAYED_S):
            printed, errors = await program.communicate()
    finally:
        if program.returncode is None:
            program.kill()
    assert program.returncode == 0, errors.decode()[-5000:]
    return [json.loads(line) for line in printed.splitlines() if line.startswith(b'{"traj')]


def assert_exact(model: Any, tokenizer: Any, row: asyncpg.Record) -> None:
    """The row's tokens are its message, and its logprobs are the policy's."""
    assert (row["trainable"], row["untrainable_reason"]) == (True, None)
    sampled = row["completion_token_ids"]
    said = tokenizer.decode(sampled)
    answer = json.loads(row["answer"]) if row["answer"] else {}
    called = len(answer.get("tool_calls", []))
    if '"tools"' not in row["parameters"]:  # smolagents' last question: a call is only text
        called = sum(row["response"].count(call) for call in CALLS)
    assert called == sum(said.count(call) for call in CALLS)
    assert row["response"].count(SAY) == said.count(SAY)
    exact = plain_logprobs(model, row["prompt_token_ids"], sampled)
    recorded = torch.tensor(row["logprobs"], dtype=torch.float64)
    torch.testing.assert_close(recorded, exact, atol=1e-4, rtol=0)


async def test_every_call_of_six_harnesses_is_trainable_with_exact_tokens(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    checkpoint = save_calling_policy(tmp_path / "v0", FIRST, LATER, context=CONTEXT)
    model, tokenizer = load_policy(checkpoint, frozen=True)
    key = str(local_key(settings.home.root))
    async with gateway(store, settings, checkpoint) as url:
        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(played(agent, url, key)) for agent in AGENTS]
        results = [program.result() for program in playing]
        await wait_until_recorded(store)
    rows = await store.pool.fetch("SELECT * FROM babylon.calls ORDER BY started_at")
    for row in rows:
        assert_exact(model, tokenizer, row)
    for agent, orders in zip(AGENTS, results, strict=True):
        own = [row for row in rows if row["agent_id"] == agent]
        assert {row["trajectory_id"] for row in own} == {one["trajectory"] for one in orders}
        answered = [json.loads(row["answer"])["tool_calls"] for row in own if row["answer"]]
        assert any('"name":"buy"' in row["parameters"] for row in own), agent
        reward = sum(one["reward"] for one in orders)
        print(f"{agent}: {len(own)} calls, {len(answered)} with tools, reward {reward:.0f}")
    # Policies act by chance, so that these hold of all agents together.
    assert any(one["role"] == "tool" for row in rows for one in json.loads(row["messages"]))
    assert sum(one["reward"] for orders in results for one in orders) > 0


async def played_by_all(url: str, key: str, *options: str) -> list[float]:
    """The rewards of all learners, who play at the same time."""
    async with asyncio.TaskGroup() as group:
        playing = [group.create_task(played(agent, url, key, *options)) for agent in LEARNERS]
    return [order["reward"] for program in playing for order in program.result()]


@pytest.mark.skipif("LEARNING" not in os.environ, reason="minutes of play: `make learning`")
async def test_a_window_that_harnesses_played_raises_the_reward_of_unseen_orders(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    """The tiny policy cannot read whom to buy, so that all orders are for one ticker. The unseen
    ones are for other numbers of shares, and no harder."""
    settings = learning(settings)
    checkpoint = save_calling_policy(tmp_path / "v0", FIRST, LATER, context=CONTEXT)
    key = str(local_key(settings.home.root))
    orders = ("--agents", "4", "--tickers", "NVDA", "--orders")
    seen = (*orders, str(SEEN // len(LEARNERS)), "--shares", "1", "2", "3", "4")
    unseen = (*orders, str(UNSEEN // len(LEARNERS)), "--shares", "5", "6", "7", "8")
    async with gateway(store, settings, checkpoint) as url:
        before = await played_by_all(url, key, *unseen)
        window = ("--at", LAST_HOUR.start.isoformat())
        window_rewards = await played_by_all(url, key, *seen, *window)
        await route_to(store, await trained_on_last_hour(store, settings, len(window_rewards)))
        after = await played_by_all(url, key, *unseen)
    assert_higher(after, before)
