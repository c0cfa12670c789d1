"""The loop for real: a fleet plays through gateway and engine, and the flow trains what it played.

Nothing is replaced. The base model is smaller than the demo's.
"""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import openai
import polars as pl
import pytest
import torch

from babylon.core.api_keys import local_key
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.core.trajectories import training_rows
from babylon.core.types import WindowResult
from babylon.core.windows import WindowState, window_at
from babylon.deployment.change import ChangeRequest, checks_under
from babylon.deployment.replace import replace_champion
from babylon.flows.train_window import train_window
from babylon.game.fleet.fleet_plan import FleetPlan
from babylon.game.fleet.spawn import run_fleet
from babylon.policies.checkpoint_files import adapter_base
from babylon.policies.load import load_policy
from babylon.serving.serve import serving
from babylon.store import Store
from babylon.store.calls import wait_until_recorded
from babylon.store.gateways import live_gateways
from babylon.store.policies import champion, ensure_base, get_policy, list_policies
from babylon.store.windows import get_window
from babylon.training.update import scored_trajectories
from tests.ports import free_port

SECRETS = ("trueProbabilities", "actualOutcomes", "predictionCorrect", "actualOutcome")
AGENTS, TICKS = 12, 6
HOUR = window_at(datetime(2026, 1, 1, 9, tzinfo=UTC))


@pytest.fixture
def base(embedded_model: Path) -> Path:
    return embedded_model


@pytest.fixture
async def live(
    settings: Settings, store: Store, base: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Settings]:
    """Serving runs, and the environment names this test's database, home and ports."""
    await ensure_base(store, uri=str(base), base_model="embedded")
    assert settings.database.url is not None
    variables = {
        "DATABASE_URL": settings.database.url.get_secret_value(),
        "BABYLON_HOME": str(settings.home.root),
        "LOCAL_ENDPOINT": f"http://localhost:{free_port()}",
        "ENGINE_PORT": str(free_port()),
        "TUNING": "full",
        "LEARNING_RATE": "1e-8",  # so small that both policies answer alike
        "WARMUP_STEPS": "0",
        "ITERATIONS": "1",
        "ARENA_SCENARIOS": "32",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    live = load_settings()
    async with serving(live.serving, live.home, live.environment()):
        yield live


async def test_an_hour_of_play_becomes_a_policy(live: Settings, store: Store, base: Path) -> None:
    plan = FleetPlan(
        start=HOUR.start, duration_min=TICKS, agents=AGENTS, agents_per_scenario=6, seed=1
    )
    fleet = await run_fleet(store, live, plan, "llm")
    assert (fleet.trajectories, fleet.scenarios, fleet.windows) == (AGENTS, 2, (HOUR.id,))
    silent = await trajectories_with_an_empty_answer(store)
    assert len(silent) < AGENTS / 2, "the base model has not learned to answer"

    result = await train_window(HOUR.id)

    assert result.status == WindowState.REJECTED, result.reason
    assert result.reason.startswith("insufficient evidence: P&L difference +0.0 [")
    rejected = await store.pool.fetch("SELECT trajectory_id, reason FROM babylon.rejections")
    assert {tuple(row) for row in rejected} == {(name, "no_response") for name in silent}
    heard = AGENTS - len(silent)
    assert (result.metrics["trajectories"], result.metrics["calls"]) == (heard, heard * TICKS)
    await the_update_is_on_policy(result)
    await replace_champion(
        store, checks_under(live), 1, ChangeRequest(author="operator", reason="by hand")
    )
    await the_new_policy_serves(live, store)
    await no_ground_truth_is_in_a_training_token(store, result, base)
    await every_trajectory_is_consumed_and_a_second_run_changes_nothing(store, result, heard)
    published = pl.read_parquet(next((live.home.datasets / "trajectories").rglob("*.parquet")))
    assert published.height == heard
    published = published.drop("outcome_rewards", "ground_truth_json")
    assert not any(secret in str(published.rows()) for secret in SECRETS)


async def trajectories_with_an_empty_answer(store: Store) -> set[str]:
    """A policy may sample nothing at all, and such play is rejected."""
    blank = "SELECT DISTINCT \"trajectoryId\" FROM llm_call_logs WHERE response ~ '^\\s*$'"
    return {row["trajectoryId"] for row in await store.pool.fetch(blank)}


async def the_update_is_on_policy(result: WindowResult) -> None:
    """Engine and trainer agree on every token: the recorded logprobs are the policy's own."""
    metrics = {name: float(value) for name, value in result.metrics.items() if _number(value)}
    assert metrics["calls_without_logprobs"] == 0
    assert metrics["logprob_mismatch"] < 1e-4 and metrics["kl_before"] < 1e-6
    assert metrics["ess"] > 0.999
    assert metrics["kl_after"] > 10 * metrics["kl_before"]


async def the_new_policy_serves(live: Settings, store: Store) -> None:
    policy, route_version = await champion(store)
    assert policy.policy_version == 1
    assert [gateway.route_version for gateway in await live_gateways(store)] == [route_version]
    key = str(local_key(live.home.root))
    async with openai.AsyncOpenAI(base_url=f"{live.serving.endpoint}/v1", api_key=key) as client:
        answer = await client.chat.completions.with_raw_response.create(
            model="babylon", messages=[{"role": "user", "content": "hello"}], max_tokens=2
        )
    assert answer.headers["x-model-version"] == "1"


async def no_ground_truth_is_in_a_training_token(
    store: Store, result: WindowResult, base: Path
) -> None:
    """The trained tokens, as text: what was sent and what was answered, and nothing else."""
    row = await get_window(store, result.window_id)
    assert row is not None and row.scored is not None
    artifact = row.scored.artifact
    assert "predictionCorrect" in str(pl.read_parquet(store.home.resolve(artifact.uri)).rows())
    rows = training_rows(store.home, artifact)
    _, tokenizer = load_policy(base)
    trajectories, excluded = scored_trajectories(tokenizer, rows, context=8192)
    assert (excluded.greedy, excluded.too_long, excluded.empty) == (0, 0, 0)
    logged = [call for row in rows for call in row.calls]
    trained = [call for trajectory in trajectories for call in trajectory.calls]
    for call, tokens in zip(logged, trained, strict=True):
        prompt, completion = tokenizer.decode(tokens.prompt), tokenizer.decode(tokens.completion)
        sent = "".join(
            f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in call.messages
        )
        assert prompt == f"{sent}<|im_start|>assistant\n"
        assert completion.removesuffix("<|im_end|>") == call.response
        assert not any(secret in prompt + completion for secret in SECRETS)


async def every_trajectory_is_consumed_and_a_second_run_changes_nothing(
    store: Store, result: WindowResult, heard: int
) -> None:
    assert await store.pool.fetchval("SELECT count(*) FROM babylon.trained") == heard
    used = 'SELECT count(*) FROM trajectories WHERE "usedInTraining"'
    assert await store.pool.fetchval(used) == heard
    await wait_until_recorded(store)
    before = await everything(store)
    again = await train_window(result.window_id)
    assert again.changed is False and "nothing was changed" in again.reason
    assert await everything(store) == before
    assert len(await list_policies(store)) == 2


async def everything(store: Store) -> list[object]:
    tables = ("windows", "policies", "routes", "trained", "scores", "rejections", "calls")
    return [await store.pool.fetch(f"SELECT * FROM babylon.{table} ORDER BY 1") for table in tables]


def _number(value: object) -> bool:
    return isinstance(value, int | float)


async def test_a_window_without_logprobs_is_trained_with_an_adapter_and_says_so(
    live: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripted agents answer without the gateway: their calls are text, and counted as such."""
    monkeypatch.setenv("TUNING", "lora")
    monkeypatch.setenv("LEARNING_RATE", "1e-7")
    plan = FleetPlan(start=HOUR.start, duration_min=TICKS, agents=8, seed=2)
    await run_fleet(store, live, plan, "scripted")

    result = await train_window(HOUR.id)

    assert result.status == WindowState.REJECTED, result.reason
    assert result.reason.startswith("insufficient evidence")
    assert result.metrics["calls_without_logprobs"] == result.metrics["calls"] == 8 * TICKS
    policy = await get_policy(store, 1)
    assert policy.kind == "lora" and (Path(policy.uri) / "adapter_config.json").exists()
    adapted, _ = load_policy(policy.uri)
    plain, _ = load_policy(str(adapter_base(policy.uri)))
    ids = torch.arange(3, 40)[None]
    assert not torch.equal(adapted(input_ids=ids).logits, plain(input_ids=ids).logits)
