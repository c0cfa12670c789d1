"""A real offline run of wandb, read back from the file that it leaves."""

import json
import logging
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.core.types import Metrics
from babylon.stages.tracking import track_window

WINDOW: Metrics = {
    "window_id": "2025-11-14T09:00",
    "policy_version": 7,
    "training_loss": -0.25,
    "deployment_success": True,
    "ratio_max": None,
}
_BLOCK, _FILE_HEADER, _HEADER = 32768, 7, struct.Struct("<IHB")


def records(path: Path) -> Iterator[Record]:
    """wandb's file is a LevelDB log: blocks of parts, each with checksum, length and kind."""
    data, at, whole = path.read_bytes(), _FILE_HEADER, b""
    while at + _HEADER.size <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER.size:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        whole += data[at : at + length]
        at += length
        if kind in (1, 4):  # a full record, or the last part of one
            yield Record.FromString(whole)
            whole = b""


def steps(settings: Settings) -> list[dict[str, Any]]:
    """The history of every file, oldest first."""
    files = sorted(settings.home.root.glob("wandb/offline-run-*/run-*.wandb"))
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
        for file in files
        for record in records(file)
        if (items := record.history.item)
    ]


def models(settings: Settings) -> list[Any]:
    """The models among the artifacts of every file."""
    files = settings.home.root.glob("wandb/offline-run-*/run-*.wandb")
    found = [one.artifact for file in files for one in records(file) if one.HasField("artifact")]
    return [one for one in found if one.type == "model"]


def saved_checkpoint(settings: Settings) -> str:
    """The reference of a checkpoint whose files hold their names."""
    checkpoint = settings.home.checkpoints / "one"
    checkpoint.mkdir(parents=True)
    for name in ("model.safetensors", "config.json", "optimizer.pt"):
        (checkpoint / name).write_text(name)
    return settings.home.reference(checkpoint)


def track(settings: Settings, metrics: Metrics, checkpoint: str = "/nowhere") -> bool:
    return track_window(settings.home, settings.model, settings.tracking, metrics, checkpoint)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(home=tmp_path / "home", tracking={"project": "babylon-test"})


def test_each_window_is_a_step_of_the_models_run(settings: Settings) -> None:
    threads = threading.active_count()
    assert track(settings, WINDOW, saved_checkpoint(settings))
    assert track(settings, WINDOW | {"policy_version": 9, "training_loss": -0.5})
    first, second = steps(settings)
    assert {name: first[name] for name in WINDOW} == WINDOW
    assert [step["_step"] for step in (first, second)] == [7, 9]
    assert second["training_loss"] == -0.5
    runs = {file.name for file in settings.home.root.glob("wandb/offline-run-*/run-*.wandb")}
    assert runs == {"run-babylon.wandb"}
    assert threading.active_count() == threads
    assert not models(settings)


@pytest.mark.parametrize(
    "quiet", [{"tracking": {"project": None}}, {"tracking": {"mode": "disabled"}}]
)
def test_without_a_project_or_disabled_nothing_is_written(
    settings: Settings, quiet: dict[str, object]
) -> None:
    assert not track(settings.replace(**quiet), WINDOW)
    assert not settings.home.root.exists()


def test_promoted_weights_become_an_artifact_if_asked_for(settings: Settings) -> None:
    asked = settings.replace(tracking={"models": True})
    assert track(asked, WINDOW, saved_checkpoint(asked))
    assert track(asked, WINDOW | {"policy_version": 8}, "wandb-artifact:///elsewhere")
    (one,) = models(asked)
    assert one.name == "babylon-policy" and "policy-7" in one.aliases
    assert {(entry.path, entry.skip_cache) for entry in one.manifest.contents} == {
        ("config.json", True),
        ("model.safetensors", True),
    }


def test_a_failure_is_only_logged(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    bad = settings.replace(tracking={"project": "no/project"})
    with caplog.at_level(logging.ERROR):
        assert not track(bad, WINDOW)
    (line,) = caplog.messages
    assert "W&B did not take window 2025-11-14T09:00" in line and "in Postgres" in line
    assert "nvalid project name" in line and "WANDB_MODE=offline" in line


def test_online_without_a_key_fails_at_once(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert not track(settings.replace(tracking={"mode": "online"}), WINDOW)
    assert "No API key configured" in caplog.text


def test_a_model_that_is_called_as_on_a_hub_has_a_run_too(settings: Settings) -> None:
    named = settings.replace(model={"name": "org/model:1"})
    assert track(named, WINDOW)
    (file,) = settings.home.root.glob("wandb/offline-run-*/run-*.wandb")
    assert file.name == "run-org-model-1.wandb"
