"""A whole promotion and its way back through an engine of its own process: the gate's match, the
checks, the route, the rollback; and the replies for an update from pairs. Before a real vLLM the
two full models take turns on one server."""

import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from transformers import AutoTokenizer

from babylon.core.settings import Settings
from babylon.core.trajectories import Call
from babylon.core.types import Trained
from babylon.core.windows import parse_window_id
from babylon.deployment.change import ChangeRequest
from babylon.deployment.rollback import roll_back
from babylon.evaluation.arena.engine_players import engine_table
from babylon.evaluation.preferences.choose import DecisionPoint
from babylon.evaluation.preferences.draws import ReplyDraw
from babylon.evaluation.preferences.engine_sample import engine_replies
from babylon.stages.deploy import deploy_checkpoint
from babylon.stages.validate_checkpoint import validate_checkpoint
from babylon.store import Store
from babylon.store.calls import wait_until_recorded
from babylon.store.policies import commit_policy, ensure_base
from babylon.store.windows import claim_window
from tests.contract.engines import (
    HELLO,
    PATIENCE_S,
    SECRET,
    VLLM_PYTHON,
    EngineUnderTest,
    host_settings,
    open_engine,
    running_embedded,
    running_host,
)
from tests.deployments import until_announced
from tests.integration.test_serving import openai_client, running_gateway, until_healthy
from tests.tiny_policy import tiny_model, tiny_tokenizer

CONTEXT = 4096
ARGS = f"--dtype float32 --enforce-eager --max-model-len {CONTEXT}"
HOLD = '{"action":"hold"}'
STAKE = (
    '{"action":"trade","trade":{"type":"prediction","market":"m1","action":"buy_yes","amount":150}}'
)
_LOUD = 4.0  # no other token is ever drawn


def save_staking_policy(path: Path, stakes: float) -> Path:
    """It stakes 150 in this share of its replies, whatever it sees, and holds in the others.

    A reply is one token. The first hidden unit is the same after all tokens but these two, and the
    second after these.
    """
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([HOLD, STAKE])
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    vocabulary = len(tokenizer)
    model = tiny_model(0, vocab_size=vocabulary, max_position_embeddings=CONTEXT, **sizes)
    hold, stake = tokenizer.convert_tokens_to_ids([HOLD, STAKE])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        embeddings = model.model.embed_tokens.weight
        embeddings[:, :2] = torch.tensor([10.0, 0.0])
        embeddings[[hold, stake], :2] = torch.tensor([0.0, 10.0])
        unit = float(model.model.norm(embeddings[:1])[0, 0])
        model.lm_head.weight.zero_()
        model.lm_head.weight[tokenizer.eos_token_id, 1] = _LOUD
        model.lm_head.weight[hold, 0] = _LOUD + math.log(1 - stakes) / unit
        model.lm_head.weight[stake, 0] = _LOUD + math.log(stakes) / unit
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if VLLM_PYTHON is None:
        with running_embedded() as url:
            yield url
        return
    home = tmp_path_factory.mktemp("home")
    settings = host_settings(home, Path(), vllm_turns="true", vllm_args=ARGS)
    with running_host(settings) as url:
        yield url


@pytest.fixture
async def engine(engine_url: str) -> AsyncIterator[EngineUnderTest]:
    async for engine in open_engine(engine_url):
        yield engine


def _unloadable(*_: object) -> NoReturn:
    raise AssertionError("a model was loaded into this process to play")


async def challenged(store: Store, champion: Path, challenger: Path) -> Trained:
    """The challenger as the update of a window."""
    await ensure_base(store, uri=str(champion), base_model="staking")
    window = parse_window_id("2025-11-14T09:00")
    claim = await claim_window(store, window, owner="worker", lease_s=PATIENCE_S)
    version = await commit_policy(
        store,
        claim,
        parent_version=0,
        kind="full",
        uri=str(challenger),
        base_model="staking",
        batch_id=f"window-{window.id}",
        trajectory_ids=["t"],
        metrics={},
    )
    return Trained(
        claim=claim,
        batch_id=f"window-{window.id}",
        policy_version=version,
        parent_version=0,
        checkpoint_uri=str(challenger),
        metrics={},
    )


async def test_a_policy_is_promoted_checked_served_and_taken_back(
    store: Store,
    settings: Settings,
    engine: EngineUnderTest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("babylon.evaluation.arena.players.checkpoint_player", _unloadable)
    settings = settings.replace(
        evaluation={"scenarios": 256, "rules": "starter"},
        serving={"engine": "vllm", "vllm_args": ARGS} if VLLM_PYTHON else {},
    )
    settings.home.root.mkdir(exist_ok=True)
    (settings.home.root / "engine.key").write_text(SECRET)
    trained = await challenged(
        store,
        save_staking_policy(tmp_path / "reckless", 0.8),
        save_staking_policy(tmp_path / "calm", 0.3),
    )
    async with (
        running_gateway(store, settings, engine.url) as url,
        openai_client(url, settings) as client,
    ):
        await until_healthy(url, timeout_s=PATIENCE_S)
        await until_announced(store)

        async def served() -> set[str]:
            asked = [
                await client.chat.completions.create(model="babylon", messages=HELLO, max_tokens=8)  # type: ignore[call-overload]
                for _ in range(8)
            ]
            assert {one.choices[0].message.content for one in asked} <= {HOLD, STAKE}
            return {one.model for one in asked}

        assert await served() == {"babylon-v0"}
        verdict = await validate_checkpoint(store, settings, trained)
        assert verdict.ruling == "promote", verdict.reason
        assert verdict.malformed_before == verdict.malformed_after == 0
        deployed = await deploy_checkpoint(store, settings, verdict)
        assert deployed.deployed, deployed.reason
        assert deployed.checks is not None and deployed.checks["passed"]
        assert await served() == {"babylon-v1"}
        await roll_back(store, ChangeRequest(author="operator", reason="by hand"))
        assert await served() == {"babylon-v0"}
        if VLLM_PYTHON:  # one server held both models, one at a time
            assert len((await engine.health())["servers"]) == 1
        await wait_until_recorded(store)
    rows = await store.pool.fetch("SELECT policy_version FROM babylon.calls WHERE arm = 'champion'")
    assert sorted(row["policy_version"] for row in rows) == [0] * 16 + [1] * 8


async def test_recorded_prompts_are_answered_again_by_their_tokens(
    store: Store, settings: Settings, engine: EngineUnderTest, tmp_path: Path
) -> None:
    path = save_staking_policy(tmp_path / "policy", 0.5)
    tokenizer = AutoTokenizer.from_pretrained(path)
    hold, stake, end = tokenizer.convert_tokens_to_ids([HOLD, STAKE, tokenizer.eos_token])
    await ensure_base(store, uri=str(path), base_model="staking")
    settings.home.root.mkdir(exist_ok=True)
    (settings.home.root / "engine.key").write_text(SECRET)
    prompts = [tuple(range(3, 90)), (1, len(tokenizer) + 10_000), (1,) * CONTEXT]
    draws = [
        ReplyDraw(point=point, prompt=prompt, max_tokens=16, temperature=0.7, seed=seed)
        for point, prompt in enumerate(prompts)
        for seed in range(32)
    ]
    points = [
        DecisionPoint(
            trajectory_id="t",
            agent_id="a",
            scenario_id="s",
            call=Call(step=0, messages=(), response=HOLD, prompt_token_ids=prompt),
            disagreement=(0.0, 0.0, 0.0),
        )
        for prompt in prompts
    ]
    async with running_gateway(store, settings, engine.url) as url:
        await until_healthy(url, timeout_s=PATIENCE_S)
        await until_announced(store)
        async with engine_table(store, "babylon", [0]) as table:
            assert table is not None
            found, foreign, too_long = await engine_replies(table, 0, points, draws)
            assert await engine_replies(table, 0, points[:1], draws[:32]) == [found]
    assert {(one.token_ids, one.text) for one in found} == {
        ((hold, end), HOLD),
        ((stake, end), STAKE),
    }
    assert len(found) == 32 and foreign == too_long == []
