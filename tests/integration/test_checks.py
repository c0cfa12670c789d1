"""The checks before a policy serves, each against a fault that was planted for it: real engine and
gateway over HTTP, real checkpoints, a real Postgres."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import babylon.deployment.checks.golden_prompts as golden_module
from babylon.core.settings import Settings
from babylon.deployment.checks.check_policy import check_policy
from babylon.deployment.checks.check_result import Checked
from babylon.deployment.checks.golden_prompts import PROMPTS, SAMPLES, golden_prompts, questions
from babylon.policies.checkpoint_files import checkpoint_digest
from babylon.store import Store
from babylon.store.calls import RecordedCall, insert_calls, wait_until_recorded
from babylon.store.gateways import GatewayRow, live_gateways, wait_until_loaded
from babylon.store.policies import ensure_base, get_policy
from babylon.store.proposals import proposed
from tests.integration.test_serving import Stack, running_stack, until_healthy
from tests.tiny_policy import save_tiny_policy, tiny_model, tiny_tokenizer
from tests.unit.serving.gateway.calls import CALL

HOLD = '{"action":"hold"}'
NOBODY = (GatewayRow(gateway_id="g", url="http://127.0.0.1:9", route_version=1),)  # is never asked
ASKED = [f"m{number} 0.5{number}" for number in range(PROMPTS)]


def nudged(base: Path, target: Path, scale: float) -> Path:
    """A full policy whose head moved by so much."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        model.lm_head.weight += scale * torch.randn_like(model.lm_head.weight)
    model.save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    return target


def adapter(base: Path, target: Path, scale: float) -> Path:
    """A LoRA policy; at scale 0 it is the base model itself, as before its first update."""
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    torch.manual_seed(2)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight += scale * torch.randn_like(weight)
    model.save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    return target


def speaking(reply: str, target: Path) -> Path:
    """A policy that has learnt to give one reply, byte by byte, and then to stop."""
    tokenizer, model = tiny_tokenizer(), tiny_model(0).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    said = [*tokenizer.encode(reply), tokenizer.eos_token_id]
    rows = [
        [*tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        ), *said]
        for text in ASKED
    ]  # fmt: skip
    ids = torch.tensor(rows)
    labels = ids.clone()
    labels[:, : -len(said)] = -100
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model of every policy."""
    return save_tiny_policy(tmp_path_factory.mktemp("base") / "v0", seed=0)


async def register(store: Store, version: int, path: Path, kind: str = "full") -> None:
    """A policy as training commits it."""
    await store.pool.execute(
        "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri, base_model,"
        " digest) VALUES ($1, 0, $2, $3, 'tiny', $4)",
        version,
        kind,
        str(path),
        checkpoint_digest(str(path)),
    )


@pytest.fixture
async def home(store: Store, base: Path) -> Store:
    """A base model is registered."""
    await ensure_base(store, uri=str(base), base_model="tiny", digest=checkpoint_digest(str(base)))
    return store


@pytest.fixture
async def stack(home: Store, settings: Settings) -> AsyncIterator[Stack]:
    """Serves the base model, of which a few agents have asked something."""
    async with running_stack(home, settings) as stack:
        await until_healthy(stack.url)
        await asked(stack)
        yield stack


async def asked(stack: Stack) -> None:
    for number, text in enumerate(ASKED):
        await stack.chat(
            messages=[{"role": "user", "content": text}],
            user=f"agent-{number}",
            max_tokens=24,
            seed=number,
        )
    await wait_until_recorded(stack.store)


@asynccontextmanager
async def held(
    stack: Stack, version: int, path: Path, kind: str = "full"
) -> AsyncIterator[tuple[GatewayRow, ...]]:
    """A proposed policy, which every gateway has loaded, while the champion serves."""
    await register(stack.store, version, path, kind)
    async with proposed(stack.store, version, "test"):
        while not (gateways := await wait_until_loaded(stack.store, version, 20)):
            await asyncio.sleep(0.05)  # on a busy machine a gateway may count as dead for a while
        yield gateways


async def check(
    store: Store,
    settings: Settings,
    version: int,
    gateways: Sequence[GatewayRow] = NOBODY,
    trained: Path | None = None,
) -> Checked:
    """``trained``: what training really made, where engines hold something else."""
    policy, champion = await get_policy(store, version), await get_policy(store, 0)
    if trained is not None:
        policy = replace(policy, uri=str(trained), digest=checkpoint_digest(str(trained)))
    checked = await check_policy(store, settings, policy, champion, gateways)
    assert (await get_policy(store, version)).checks == json.loads(json.dumps(checked.as_json()))
    return checked


def failed(checked: Checked) -> list[str]:
    return [check.name for check in checked.checks if not check.passed]


async def test_an_honest_update_passes_and_its_probes_are_nobodys_play(
    stack: Stack, settings: Settings, base: Path, tmp_path: Path
) -> None:
    before = len(await stack.rows())
    async with held(stack, 1, nudged(base, tmp_path / "v1", 0.02)) as gateways:
        checked = await check(stack.store, settings, 1, gateways)
    assert checked.passed, checked.reason
    assert [one.name for one in checked.checks] == [
        "digest", "answers", "loads", "finite", "served", "agrees", "learned", "kl", "form",
    ]  # fmt: skip
    figures = {one.name: one.figures for one in checked.checks}
    assert figures["answers"]["probes"] == len(ASKED) * SAMPLES
    assert figures["agrees"]["most"] < 1e-4
    assert 0 < figures["kl"]["kl"] < 0.1
    rows = (await stack.rows())[before:]
    assert len(rows) == 2 * len(ASKED) * SAMPLES
    for row in rows:
        assert (row["arm"], row["agent_id"], row["trajectory_id"]) == ("pinned", None, None)
    golden = await golden_prompts(
        stack.store, settings.evaluation, await get_policy(stack.store, 0)
    )
    assert sorted(prompt.messages[0]["content"] for prompt in golden) == ASKED


async def test_an_engine_that_serves_the_base_under_the_policys_name_is_caught(
    stack: Stack, settings: Settings, base: Path, tmp_path: Path
) -> None:
    """Also when the update is so small that every tolerance would let it through."""
    trained = adapter(base, tmp_path / "v1", 1e-4)
    async with held(stack, 1, base, "lora") as gateways:
        checked = await check(stack.store, settings, 1, gateways, trained)
    assert failed(checked) == ["served"]
    assert "serves the champion under the policy's name" in checked.reason


async def test_an_engine_that_serves_another_adapter_is_caught(
    stack: Stack, settings: Settings, base: Path, tmp_path: Path
) -> None:
    trained = adapter(base, tmp_path / "v1", 0.05)
    other = adapter(base, tmp_path / "other", 0.1)
    async with held(stack, 1, other, "lora") as gateways:
        checked = await check(stack.store, settings, 1, gateways, trained)
    assert "agrees" in failed(checked)
    async with held(stack, 2, trained, "lora") as gateways:
        assert (await check(stack.store, settings, 2, gateways)).passed


async def test_a_gateway_that_does_not_know_the_policy_refuses_it(
    stack: Stack, settings: Settings, base: Path, tmp_path: Path
) -> None:
    await register(stack.store, 1, nudged(base, tmp_path / "v1", 0.02))
    checked = await check(stack.store, settings, 1, await live_gateways(stack.store))
    assert failed(checked) == ["answers"]
    assert "404" in checked.reason


def call(text: str, *, agent: str | None = "a", number: int = 0, **fields: Any) -> RecordedCall:
    """A recorded call of the champion."""
    made = replace(
        CALL,
        call_id=f"{agent}-{text}-{number}",
        agent_id=agent,
        policy_version=0,
        messages=json.dumps([{"role": "user", "content": text}]),
        response=HOLD,
        max_tokens=24,
        started_at=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number),
    )
    return replace(made, **fields)


@pytest.mark.parametrize(("kind", "scale"), [("full", 1e-6), ("lora", 1e-3)])
async def test_a_small_honest_update_passes(
    stack: Stack, settings: Settings, base: Path, tmp_path: Path, kind: str, scale: float
) -> None:
    path = (nudged if kind == "full" else adapter)(base, tmp_path / "v1", scale)
    async with held(stack, 1, path, kind) as gateways:
        checked = await check(stack.store, settings, 1, gateways)
    assert checked.passed, checked.reason


async def test_the_base_model_itself_may_serve_again(stack: Stack, settings: Settings) -> None:
    checked = await check(stack.store, settings, 0, await live_gateways(stack.store))
    assert checked.passed, checked.reason


async def test_nan_weights_refused(
    stack: Stack, settings: Settings, base: Path, tmp_path: Path
) -> None:
    """Also when the engine holds better ones."""
    trained = nudged(base, tmp_path / "v1", float("nan"))
    async with held(stack, 1, base) as gateways:
        checked = await check(stack.store, settings, 1, gateways, trained)
    assert failed(checked) == ["loads"]
    assert "are not finite" in checked.reason


async def test_a_checkpoint_that_the_trainer_cannot_load_is_refused(
    stack: Stack, settings: Settings, base: Path, tmp_path: Path
) -> None:
    trained = nudged(base, tmp_path / "v1", 0.02)
    (trained / "model.safetensors").write_bytes(b"")
    async with held(stack, 1, base) as gateways:
        checked = await check(stack.store, settings, 1, gateways, trained)
    assert failed(checked) == ["loads"]
    assert "train it again" in checked.reason


async def test_files_that_changed_since_the_commit_are_refused_unread(
    home: Store, settings: Settings, base: Path, tmp_path: Path
) -> None:
    path = nudged(base, tmp_path / "v1", 0.02)
    await register(home, 1, path)
    weights = path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    checked = await check(home, settings, 1)
    assert [one.name for one in checked.checks] == failed(checked) == ["digest"]
    assert "restore them" in checked.reason
    shutil.rmtree(path)
    assert "no such directory" in (await check(home, settings, 1)).reason


async def test_a_policy_without_a_digest_is_served(
    stack: Stack, settings: Settings, base: Path, tmp_path: Path
) -> None:
    async with held(stack, 1, nudged(base, tmp_path / "v1", 0.02)) as gateways:
        await stack.store.pool.execute("UPDATE babylon.policies SET digest = NULL")
        assert (await check(stack.store, settings, 1, gateways)).passed


async def test_an_adapter_of_another_base_or_of_none_is_refused(
    home: Store, settings: Settings, base: Path, tmp_path: Path
) -> None:
    """The other base has the same shapes, so every engine would load the adapter."""
    other = save_tiny_policy(tmp_path / "other", seed=3)
    await register(home, 1, adapter(other, tmp_path / "v1", 0.02), "lora")
    checked = await check(home, settings, 1)
    assert failed(checked) == ["base"]
    assert str(other) in checked.reason
    assert str(base) in checked.reason
    shutil.rmtree(other)
    assert failed(await check(home, settings, 1)) == ["base"]


async def test_a_changed_base_is_refused(store: Store, settings: Settings, tmp_path: Path) -> None:
    mine = save_tiny_policy(tmp_path / "v0", seed=0)
    await ensure_base(store, uri=str(mine), base_model="tiny", digest=checkpoint_digest(str(mine)))
    await register(store, 1, adapter(mine, tmp_path / "v1", 0.02), "lora")
    save_tiny_policy(mine, seed=4)
    checked = await check(store, settings, 1)
    assert failed(checked) == ["base"]
    assert "when policy 0 was committed" in checked.reason


async def test_an_adapter_that_learned_nothing_is_refused(
    stack: Stack, settings: Settings, base: Path, tmp_path: Path
) -> None:
    async with held(stack, 1, adapter(base, tmp_path / "v1", 0.0), "lora") as gateways:
        checked = await check(stack.store, settings, 1, gateways)
    assert failed(checked) == ["learned"]


async def test_far_policies_are_refused(stack: Stack, settings: Settings, tmp_path: Path) -> None:
    async with held(stack, 1, save_tiny_policy(tmp_path / "v1", seed=5)) as gateways:
        checked = await check(stack.store, settings, 1, gateways)
        assert failed(checked) == ["kl"]
        raised = settings.replace(deployment={"max_serving_kl": 50.0})
        assert (await check(stack.store, raised, 1, gateways)).passed


async def test_a_policy_that_writes_no_json_fails_the_check_of_form(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    teller = speaking(HOLD, tmp_path / "v0")
    await ensure_base(store, uri=str(teller), base_model="tiny")
    await insert_calls(store, [call(text, agent=f"agent-{text}") for text in ASKED])
    lax = settings.replace(deployment={"max_serving_kl": 50.0})
    async with running_stack(store, settings) as stack:
        await until_healthy(stack.url)
        async with held(stack, 1, speaking(HOLD[:-1] + ",", tmp_path / "v1")) as gateways:
            checked = await check(store, lax, 1, gateways)
    assert failed(checked) == ["form"]
    assert "of the champion's 0 of" in checked.reason


async def test_a_new_home_whose_context_is_small_is_asked_what_fits(
    home: Store, settings: Settings, base: Path, tmp_path: Path
) -> None:
    """The simulator's prompts are longer than the 512 tokens of this model."""
    golden = await golden_prompts(home, settings.evaluation, await get_policy(home, 0))
    assert [prompt.form for prompt in golden] == [None] * PROMPTS
    async with running_stack(home, settings) as stack:
        await until_healthy(stack.url)
        async with held(stack, 1, nudged(base, tmp_path / "v1", 0.02)) as gateways:
            checked = await check(home, settings, 1, gateways)
    assert checked.passed, checked.reason
    figures = {one.name: one.figures for one in checked.checks}
    assert figures["answers"]["probes"] == PROMPTS * SAMPLES
    assert figures["answers"]["left_out"] == 0


async def test_a_context_without_room_for_any_prompt_is_not_asked(
    home: Store, settings: Settings, base: Path, tmp_path: Path
) -> None:
    narrow = shutil.copytree(base, tmp_path / "v1")
    config = json.loads((narrow / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    await home.pool.execute("UPDATE babylon.policies SET uri = $1, digest = NULL", str(narrow))
    checked = await check(home, settings, 0)
    assert checked.passed
    assert "no room for a prompt" in checked.checks[-1].reason


async def test_golden_prompts_differ_in_agent(store: Store, settings: Settings) -> None:
    busy = [call(f"busy {n}", agent="busy", number=n) for n in range(1, 12)]
    again = [call("busy 3", agent="echo", number=50), call("late", agent="echo", number=20)]
    others = [
        call("tools", number=60, parameters='{"tools":[{"type":"function"}]}'),
        call("a schema", number=61, parameters='{"response_format":{"type":"json_object"}}'),
        call("a probe", agent=None, number=62, arm="pinned"),
        call("a completion", number=63, messages='{"prompt":"x"}'),
        call("another policy's", number=64, policy_version=7),
    ]
    await insert_calls(store, [*busy, *again, *others])
    await ensure_base(store, uri="/base", base_model="tiny")
    golden = await golden_prompts(store, settings.evaluation, await get_policy(store, 0))
    texts = [prompt.messages[0]["content"] for prompt in golden]
    newest = [f"busy {number}" for number in (11, 10, 9, 8, 7, 6)]
    assert texts == ["busy 3", newest[0], "late", *newest[1:]]
    assert golden == await golden_prompts(store, settings.evaluation, await get_policy(store, 0))


async def test_golden_prompts_are_looked_for_among_the_newest_calls_only(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All calls of a champion that serves for weeks would be read if its prompts are too long."""
    monkeypatch.setattr(golden_module, "_READ", 3)
    await ensure_base(store, uri="/base", base_model="tiny")
    too_long = {"prompt_token_ids": [5] * (golden_module.MOST_PROMPT_TOKENS + 1)}
    calls = [call(f"long {n}", number=n, **too_long) for n in (2, 3)]
    await insert_calls(store, [call("old", number=0), call("new", number=1), *calls])
    golden = await golden_prompts(store, settings.evaluation, await get_policy(store, 0))
    texts = [prompt.messages[0]["content"] for prompt in golden]
    assert texts[0] == "new" and "old" not in texts


async def test_the_simulators_prompts_fill_up_too_few(store: Store, settings: Settings) -> None:
    """They have the game's form only if the fleet plays the game."""
    await ensure_base(store, uri="/base", base_model="tiny")
    await insert_calls(store, [call("poem", response="Roses are red.")])
    first, *others = await golden_prompts(store, settings.evaluation, await get_policy(store, 0))
    assert (first.form, first.max_tokens) == ("text", 24)
    assert [prompt.form for prompt in others] == [None] * (PROMPTS - 1)
    await insert_calls(store, [call("m1 0.50", agent="b")])
    forms = [
        prompt.form
        for prompt in await golden_prompts(store, settings.evaluation, await get_policy(store, 0))
    ]
    assert sorted(map(str, forms)) == ["order"] * (PROMPTS - 1) + ["text"]


async def test_new_homes_have_the_simulators_prompts(store: Store, settings: Settings) -> None:
    await ensure_base(store, uri="/base", base_model="tiny")
    golden = await golden_prompts(store, settings.evaluation, await get_policy(store, 0))
    assert len(golden) == PROMPTS
    assert {prompt.form for prompt in golden} == {"order"}
    assert golden == await golden_prompts(store, settings.evaluation, await get_policy(store, 0))


async def test_a_reply_with_room_to_end_must_have_the_form(home: Store, settings: Settings) -> None:
    """A reply that would not fit twice, under a limit of ours, may be cut: that says nothing."""
    essay = {"max_tokens": 0, "completion_token_ids": [5] * 200, "logprobs": [-1.0] * 200}
    note = {"max_tokens": 4000, "response": "[1]"}
    await insert_calls(
        home,
        [
            call("essay", agent="b", number=1, **essay),
            call("note", agent="c", number=2, **note),
            call(ASKED[0], agent="d", number=3),
        ],
    )
    golden = await golden_prompts(home, settings.evaluation, await get_policy(home, 0))
    forms = {prompt.messages[0]["content"]: (prompt.form, prompt.max_tokens) for prompt in golden}
    assert forms["essay"] == (None, 256)
    assert forms["note"] == ("json", 256)
    assert ("order", 24) in forms.values()


@pytest.mark.parametrize("gateways", [1, 3, 11])
async def test_all_gateways_are_asked(home: Store, settings: Settings, gateways: int) -> None:
    golden = await golden_prompts(home, settings.evaluation, await get_policy(home, 0))
    asked = questions(golden, gateways)
    for number in range(gateways):
        assert {prompt for prompt, _ in asked[number::gateways]} == set(range(PROMPTS))
    assert len({(prompt, ask.seed) for prompt, ask in asked}) == len(asked)


def test_the_digest_is_of_what_decides_and_of_nothing_else(base: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    digest = checkpoint_digest(str(copy))
    assert digest == checkpoint_digest(str(base))
    (copy / "optimizer.pt").write_bytes(b"moments")
    assert checkpoint_digest(str(copy)) == digest
    (copy / "tokenizer_config.json").write_text("{}")
    assert checkpoint_digest(str(copy)) != digest
    assert checkpoint_digest("owner/model") is None
