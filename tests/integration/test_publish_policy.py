"""Promoted policies on the hub: one commit and one tag each, loadable as they were validated."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from babylon.core.errors import ConfigError, PublishError
from babylon.core.settings import Settings
from babylon.core.windows import parse_window_id
from babylon.dataset import publish_policy as module
from babylon.dataset.erase import erase
from babylon.dataset.publish_policy import PublishedPolicy, publish_policy
from babylon.policies import whole_weights
from babylon.policies.load import load_policy
from babylon.policies.whole_weights import CONVERTER
from babylon.store import Store
from babylon.store.policies import commit_policy, ensure_base, set_verdict
from babylon.store.published import withhold
from babylon.store.routes import commit_route
from babylon.store.windows import claim_window
from tests.hub_double import TOKEN, HubState
from tests.tiny_policy import tiny_model, tiny_tokenizer

MODELS = "models/owner/trader"
WINDOW = "2025-11-14T09:00"


@pytest.fixture
def models(publisher: Settings) -> Settings:
    return publisher.replace(publish={"models": "owner/trader"})


async def promoted(store: Store, settings: Settings, *, base_model: str | None = None) -> Path:
    """Policy 1, a LoRA adapter of a tiny base, trained from ``t1`` and champion → its base."""
    base = settings.home.models / "tiny"
    adapter = settings.home.checkpoints / "one"
    tiny_model(1).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    adapted.save_pretrained(adapter)
    tiny_tokenizer().save_pretrained(adapter)
    (adapter / "optimizer.pt").write_bytes(b"the trainer's own")
    await ensure_base(store, uri=str(base), base_model=base_model or str(base))
    claim = await claim_window(store, parse_window_id(WINDOW), owner="test", lease_s=60)
    version = await commit_policy(
        store, claim, parent_version=0, kind="lora", uri=str(adapter),
        base_model=base_model or str(base), batch_id="b1", trajectory_ids=["t1"],
        metrics={"training_loss": 0.125, "note": str(base)},
    )  # fmt: skip
    assert version == 1
    return base


async def serve(store: Store, version: int = 1) -> None:
    await commit_route(
        store, policy_version=version, author="test", reason="test", expected_route_version=1
    )


async def push(store: Store, settings: Settings, **options: object) -> PublishedPolicy | None:
    return await publish_policy(store, settings.home, settings.publish, **options)  # type: ignore[arg-type]


async def test_a_promoted_policy_is_one_commit_and_loads_as_it_was_validated(
    store: Store, models: Settings, hub: HubState, tmp_path: Path
) -> None:
    await promoted(store, models)
    assert await push(store, models) is None and hub.requests == []  # the base model leads
    await serve(store)
    planned = await push(store, models, dry_run=True)
    assert planned and hub.requests == [] and "model.safetensors" in planned.files
    made = await push(store, models)
    assert made and made.files == planned.files and made.bytes == planned.bytes
    repository = hub.repositories[MODELS]
    assert repository.private and hub.commits(MODELS) == ["Policy 1"]
    assert repository.tags == {"policy-1": made.revision} == {"policy-1": repository.head}
    assert not any("optimizer" in path for path in repository.files)
    assert await push(store, models) is None and hub.commits(MODELS) == ["Policy 1"]

    fetched = snapshot_download(
        "owner/trader", endpoint=hub.url, token=TOKEN, local_dir=tmp_path / "fetched"
    )
    loaded = AutoModelForCausalLM.from_pretrained(fetched, dtype=torch.float32)
    own, tokenizer = load_policy(settings_uri(models))
    ids = torch.tensor([tokenizer("hold")["input_ids"]])
    assert torch.equal(loaded(ids).logits, own(ids).logits)
    assert AutoTokenizer.from_pretrained(fetched)("hold") == tokenizer("hold")
    texts = b"".join(file for _, (kind, file) in repository.files.items() if kind == "file")
    assert str(models.home.root).encode() not in texts


async def test_whole_weights_of_a_killed_run_lie_where_the_next_start_deletes_them(
    store: Store, models: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await promoted(store, models)
    await serve(store)
    made: list[Path] = []

    def write(uri: str, base: str, directory: Path) -> None:
        made.append(directory)
        raise KeyboardInterrupt  # no handler runs in a process that is killed

    monkeypatch.setattr(whole_weights, "write_whole", write)
    with pytest.raises(KeyboardInterrupt):
        await push(store, models, dry_run=True)
    assert made[0].is_relative_to(models.home.scratch)


async def test_full_weights_are_published_in_the_precision_of_the_base(
    store: Store, models: Settings, hub: HubState, tmp_path: Path
) -> None:
    base = await promoted(store, models)
    masters = models.home.checkpoints / "masters"
    for path, dtype in ((base, torch.bfloat16), (masters, torch.float32)):
        tiny_model(1).to(dtype).save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
    claim = await claim_window(store, parse_window_id("2025-11-14T10:00"), owner="t", lease_s=60)
    await commit_policy(
        store, claim, parent_version=0, kind="full", uri=str(masters), base_model=str(base),
        batch_id="b2", trajectory_ids=[], metrics={},
    )  # fmt: skip
    await serve(store, 2)
    assert await push(store, models)
    fetched = snapshot_download(
        "owner/trader", endpoint=hub.url, token=TOKEN, local_dir=tmp_path / "fetched"
    )
    assert AutoModelForCausalLM.from_pretrained(fetched).dtype == torch.bfloat16


def settings_uri(settings: Settings) -> str:
    return str(settings.home.checkpoints / "one")


async def test_the_card_tells_windows_verdict_lineage_and_metrics(
    store: Store, models: Settings, hub: HubState
) -> None:
    await promoted(store, models)
    claim = await claim_window(store, parse_window_id("2025-11-14T10:00"), owner="t", lease_s=60)
    await set_verdict(store, claim, 1, gate())
    await serve(store)
    await push(store, models)
    card = hub.repositories[MODELS].files["README.md"][1].decode()
    assert card.startswith("---\nlicense: cc-by-4.0\n") and "datasets:\n- owner/play" in card
    assert "| 1 | 0 | 2025-11-14T09:00 | 1 |" in card
    assert "It passed: it earns more." in card and "| mean profit of this policy | 2.5 |" in card
    assert "| training_loss | 0.125 |" in card and "note" not in card
    assert 'revision="policy-1"' in card and "$" not in card.replace("US dollars", "")


def gate() -> dict[str, object]:
    return {"promote": True, "reason": "it earns more", "scenarios": 32, "pnl_after": 2.5}


@pytest.mark.parametrize(
    ("part", "status", "after"),
    [
        ("/commit/", 503, False),
        ("/commit/", 0, True),
        ("/tag/", 500, False),
        ("/batch", 429, False),
    ],
)
async def test_a_fault_that_passes_leaves_one_commit_of_a_policy(
    store: Store, models: Settings, hub: HubState, part: str, status: int, after: bool
) -> None:
    await promoted(store, models)
    await serve(store)
    hub.fail(part, status, after=after)
    made = await push(store, models)
    assert made and hub.commits(MODELS) == ["Policy 1"]
    assert hub.repositories[MODELS].tags == {"policy-1": made.revision}


async def test_a_run_that_died_after_its_commit_makes_no_second_one(
    store: Store, models: Settings, hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    await promoted(store, models)
    await serve(store)

    async def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "record_published_policy", dies)
        await push(store, models)
    assert (await push(store, models)) and hub.commits(MODELS) == ["Policy 1"]
    hub.fail("/commit/", 403, times=9)
    await store.pool.execute("DELETE FROM babylon.published_policies")
    assert await push(store, models)  # identical content asks for no commit
    assert hub.commits(MODELS) == ["Policy 1"]


async def test_a_run_that_died_after_its_commit_is_known_to_a_take_down(
    store: Store, models: Settings, hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another policy may be champion by then, so that no run ever enters this one."""
    await promoted(store, models)
    await serve(store)
    real = module._send

    def dies(*arguments: Any) -> str:
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_send", dies)
        await push(store, models)
    found = await erase(store, models.home, models.publish, "trajectory", "t1")
    assert found.models == ("owner/trader@policy-1",)
    assert await push(store, models) and hub.commits(MODELS) == ["Policy 1"]


async def test_a_take_down_while_the_files_are_made_stops_the_commit(
    store: Store, models: Settings, hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    await promoted(store, models)
    await serve(store)
    real, checks = module._check, iter([False, True])

    async def check(*arguments: Any) -> None:
        if next(checks):  # the files are made
            await withhold(store, "trajectory", "t1", "")
        await real(*arguments)

    monkeypatch.setattr(module, "_check", check)
    with pytest.raises(ConfigError, match="taken down"):
        await push(store, models)
    assert hub.requests == []


async def test_an_agent_stays_taken_down_when_its_rows_are_deleted(
    store: Store, models: Settings, hub: HubState
) -> None:
    await promoted(store, models)
    await serve(store)
    await store.game.execute("INSERT INTO \"User\" (id) VALUES ('ann')")
    await store.game.execute(
        'INSERT INTO trajectories (id, "trajectoryId", "agentId", "startTime", "endTime",'
        ' "durationMs", "stepsJson", "rewardComponentsJson", "metricsJson", "metadataJson",'
        ' "totalReward", "episodeLength", "finalStatus", "updatedAt") VALUES (\'t1\', \'t1\','
        " 'ann', now(), now(), 0, '[]', '{}', '{}', '{}', 0, 0, 'completed', now())"
    )
    await erase(store, models.home, models.publish, "agent", "ann", apply=True)
    await store.game.execute("DELETE FROM trajectories")
    with pytest.raises(ConfigError, match="learnt from 1 trajectories that were taken down"):
        await push(store, models)


async def test_an_adapter_names_its_base_on_the_hub(
    store: Store, models: Settings, hub: HubState
) -> None:
    await promoted(store, models, base_model="Qwen/Qwen2.5-0.5B-Instruct")
    await serve(store)
    await push(store, models.replace(publish={"models_as": "adapter"}))
    files = hub.repositories[MODELS].files
    config = json.loads(files["adapter_config.json"][1])
    assert config["base_model_name_or_path"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    card = files["README.md"][1].decode()
    assert "library_name: peft" in card and "base_model: Qwen/Qwen2.5-0.5B-Instruct" in card


async def test_what_may_not_be_published_is_refused_with_the_remedy(
    store: Store, models: Settings, hub: HubState
) -> None:
    await promoted(store, models)
    for version, remedy in ((0, "is the base model"), (1, "promote it first")):
        with pytest.raises(ConfigError, match=remedy):
            await push(store, models, version=version)
    await serve(store)
    with pytest.raises(ConfigError, match="PUBLISH_MODELS_TO"):
        await push(store, models.replace(publish={"models": None}))
    with pytest.raises(ConfigError, match="PUBLISH_MODELS_AS=merged"):
        await push(store, models.replace(publish={"models_as": "adapter"}))
    await withhold(store, "trajectory", "t1", "")
    with pytest.raises(ConfigError, match="learnt from 1 trajectories that were taken down"):
        await push(store, models)
    assert hub.requests == []


async def test_an_erasure_names_the_published_policies_that_learnt_from_it(
    store: Store, models: Settings, hub: HubState
) -> None:
    await promoted(store, models)
    await serve(store)
    await push(store, models)
    await withhold(store, "trajectory", "t1", "")
    found = await erase(store, models.home, models.publish, "trajectory", "t1")
    assert found.models == ("owner/trader@policy-1",)
    assert "owner/trader@policy-1 is published" in " ".join(found.advice)


@pytest.mark.parametrize("works", [True, False])
async def test_weights_for_llama_cpp_are_added_where_its_converter_is_at_hand(
    store: Store, models: Settings, hub: HubState, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path, works: bool, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    """The converter is a program of the same name and arguments: the real one is on no index."""
    await promoted(store, models)
    await serve(store)
    converter = tmp_path / CONVERTER
    code = (
        'test -f "$1/model.safetensors" && printf GGUF > "$3"' if works else "echo no >&2; exit 1"
    )
    converter.write_text(f"#!/bin/sh\n{code}\n")
    converter.chmod(converter.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    await push(store, models)
    files = hub.repositories[MODELS].files
    assert ("model.gguf" in files) == works == ("llama.cpp" in files["README.md"][1].decode())
    assert works or "no gguf" in caplog.text


async def test_an_upload_that_fails_inside_the_client_is_a_typed_error(
    store: Store, models: Settings, hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    await promoted(store, models)
    await serve(store)

    def breaks(*_: object, **__: object) -> None:
        raise RuntimeError("https://signed?secret") from ValueError("secret")

    monkeypatch.setattr("huggingface_hub.HfApi.create_commit", breaks)
    with pytest.raises(PublishError, match=r"RuntimeError from ValueError.*nothing was") as failure:
        await push(store, models)
    assert "secret" not in str(failure.value)
