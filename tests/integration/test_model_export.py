"""``babylon model export``: an adapter's whole weights, as other programs load them."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from babylon.core.settings_loading import load_settings
from babylon.policies.load import load_policy
from babylon.store import open_store
from babylon.store.policies import ensure_base
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
