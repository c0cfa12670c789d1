"""A trainer that cannot work here is refused before a window is claimed."""

from pathlib import Path
from typing import Any

import pytest

from babylon.core.errors import ConfigError
from babylon.core.settings_loading import load_settings
from babylon.training.backends.trainer_requirements import require_trainer
from tests.imported import imported_with


@pytest.mark.parametrize(
    ("chosen", "key", "message"),
    [
        ({"training": {"trainer": "serverless"}}, "", "set WANDB_API_KEY"),
        (
            {"training": {"trainer": "serverless"}, "model": {"base": "some/model"}},
            "k",
            "does not train some/model",
        ),
        ({"training": {"trainer": "serverless", "tuning": "full"}}, "k", "trains LoRA adapters"),
        ({"training": {"trainer": "serverless", "kl_penalty": 0.1}}, "k", "has no counterpart"),
        (
            {"training": {"trainer": "serverless", "recall_chats": Path("chats.jsonl")}},
            "k",
            "RECALL_CHATS=chats.jsonl is not measured",
        ),
        (
            {"training": {"trainer": "art-local"}},
            "",
            "needs unsloth, unsloth_zoo, trl, bitsandbytes",
        ),
        ({"training": {"trainer": "art-local", "tuning": "full"}}, "", "trains LoRA adapters"),
    ],
)
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, chosen: dict[str, Any], key: str, message: str
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", key)
    settings = load_settings(**chosen)
    with pytest.raises(ConfigError, match=message):
        require_trainer(settings.training, settings.model)


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"training": {"trainer": "serverless"}},  # with the policies that this home has
        {"training": {"trainer": "serverless"}, "model": {"base": "OpenPipe/Qwen3-14B-Instruct"}},
    ],
)
def test_what_can_work_is_let_through(
    monkeypatch: pytest.MonkeyPatch, chosen: dict[str, Any]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k")
    settings = load_settings(**chosen)
    require_trainer(settings.training, settings.model)


def test_asking_costs_no_heavy_import() -> None:
    assert not imported_with("babylon.training.backends.trainer_requirements") & {
        "torch",
        "art",
        "wandb",
        "openai",
    }
