"""``babylon model export``: a policy's whole weights, as other programs load them."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from babylon.core.settings_loading import load_settings
from babylon.core.windows import parse_window_id
from babylon.policies.load import load_policy
from babylon.store import open_store
from babylon.store.policies import commit_policy, ensure_base
from babylon.store.windows import claim_window
from tests.integration.test_checks import adapter
from tests.integration.test_traces_cli import Capture, run
from tests.tiny_policy import tiny_model, tiny_tokenizer


@pytest.fixture
def adapted(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Policy 0 is an adapter above a base in bf16."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("BABYLON_HOME", str(tmp_path / "home"))
    base = tmp_path / "base"
    tiny_model(0).to(torch.bfloat16).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    path = adapter(base, tmp_path / "adapter", 0.05)

    async def register() -> None:
        async with open_store(load_settings()) as store:
            await ensure_base(store, uri=str(path), base_model="adapted")

    asyncio.run(register())
    return path


def test_a_full_checkpoint_gets_the_precision_of_the_base_again(
    adapted: Path, tmp_path: Path
) -> None:
    masters, target = tmp_path / "masters", tmp_path / "whole"
    tiny_model(1).save_pretrained(masters)
    tiny_tokenizer().save_pretrained(masters)

    async def register() -> None:
        async with open_store(load_settings()) as store:
            claim = await claim_window(
                store, parse_window_id("2025-11-14T09:00"), owner="test", lease_s=60
            )
            await commit_policy(
                store, claim, parent_version=0, kind="full", uri=str(masters),
                base_model="adapted", batch_id="b", trajectory_ids=[], metrics={},
            )  # fmt: skip

    asyncio.run(register())
    assert run("model", "export", "1", str(target)) == 0
    whole = AutoModelForCausalLM.from_pretrained(target)
    assert whole.dtype == torch.bfloat16
    assert torch.equal(whole.lm_head.weight, tiny_model(1).lm_head.weight.bfloat16())


def test_the_weights_are_merged_and_have_the_bases_precision(
    adapted: Path, tmp_path: Path, capsys: Capture
) -> None:
    target = tmp_path / "whole"
    assert run("model", "export", "0", str(target), "--json") == 0
    assert str(target) in capsys.readouterr().out
    whole = AutoModelForCausalLM.from_pretrained(target)
    assert whole.dtype == torch.bfloat16
    prompt = torch.tensor([AutoTokenizer.from_pretrained(target)("m1 0.50")["input_ids"]])
    expected = load_policy(str(adapted))[0].float()(prompt).logits
    base = load_policy(str(tmp_path / "base"))[0].float()(prompt).logits
    found = whole.float()(prompt).logits
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)
    assert (found - expected).norm() < 0.2 * (base - expected).norm()
    assert run("model", "export", "0", str(target)) == 1
    assert "exists: name a new directory" in capsys.readouterr().err
    assert run("model", "export", "0", str(target / "config.json" / "whole")) == 1
    assert "a file lies where a directory must be" in capsys.readouterr().err
