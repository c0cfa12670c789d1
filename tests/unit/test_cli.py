"""The command line as a script meets it: exit codes, one JSON object, one clear line."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from babylon.cli import main
from babylon.cli.output import print_table
from babylon.cli.report import window_table
from babylon.types import WindowResult
from babylon.windows import WindowState
from tests.imported import imported_with

ROOT = Path(__file__).parents[2]
COMMANDS = [
    ["train"],
    ["demo"],
    ["up"],
    ["down"],
    ["status"],
    ["doctor"],
    ["agents", "spawn"],
    ["windows", "list"],
    ["windows", "check"],
    ["model", "init"],
    ["model", "list"],
    ["model", "show"],
    ["model", "promote"],
    ["model", "rollback"],
    ["deploy", "replace"],
    ["deploy", "status"],
    ["dataset", "build"],
    ["db", "migrate"],
    ["db", "status"],
    ["db", "import"],
]


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_offers_json(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*command, "--help") == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--mode", "sometimes"],
        ["train", "--trainer", "serverless"],
        ["train", "--mode", "backfill", "--window", "2025-11-14T09:00"],
        ["train", "--backfill-hours", "3"],
        ["train", "--frequency", "3"],
        ["train", "--min-agents", "1"],
        ["deploy", "canary"],
        ["model", "show", "newest"],
        ["nonsense"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err


def test_wrong_usage_is_an_object_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("windows", "list", "--min-agents", "1", "--json") == 2
    captured = capsys.readouterr()
    assert "--min-agents" in json.loads(captured.out)["error"] and captured.err


@pytest.mark.parametrize("scorer", ["unknown", "no_module:f", "..above:f", "broken:f"])
def test_a_scorer_that_cannot_be_used_is_refused_before_prefect_starts(
    scorer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken.py").write_text("def f(:")
    monkeypatch.syspath_prepend(tmp_path)
    assert exit_code("train", "--scorer", scorer, "--json") == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: scorer '{scorer}'") and captured.err.count("\n") == 1
    assert json.loads(captured.out)["kind"] == "ConfigError"


def test_a_home_that_is_a_file_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").touch()
    monkeypatch.setenv("BABYLON_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DATABASE_URL", raising=False)
    for command in (["train"], ["up"], ["db", "status"]):
        assert exit_code(*command) == 1
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1 and "BABYLON_HOME" in captured.err


def test_the_training_table_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {
        "trajectories": 1000,
        "pnl_before": -1234.5,
        "pnl_after": 1234.5,
        "win_rate_before": 0.08,
        "win_rate_after": 1.0,
        "avg_reward": 0.61,
        "training_loss": -0.284,
        "kl_before": 0.0,
        "kl_after": 6.3e-7,
    }
    result = WindowResult(
        window_id="2026-11-21T06:00", status=WindowState.DEPLOYED, reason="", metrics=metrics
    )
    print_table("Training", *window_table([result]))
    lines = capsys.readouterr().out.splitlines()
    assert "-1234.5→1234.5" in lines[-1] and "8→100" in lines[-1] and "0→6e-07" in lines[-1]
    assert max(len(line.rstrip()) for line in lines) <= 80


def test_a_bad_setting_is_one_clear_line_and_with_json_an_object(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code("train", "--max-dropout", "1.5", "--json") == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    report = json.loads(captured.out)
    assert report["kind"] == "ConfigError" and "1.5" in report["error"]


@pytest.mark.parametrize(
    ("window", "kind"),
    [
        ("yesterday", "WindowError"),
        ("2025-11-14T09:17", "WindowError"),
        ("2999-01-01T00:00", "WindowNotReadyError"),
    ],
)
def test_a_window_that_cannot_be_trained_is_refused_at_once(
    window: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("train", "--window", window, "--json") == 1
    captured = capsys.readouterr()
    assert window in captured.err
    assert json.loads(captured.out)["kind"] == kind


def test_train_without_a_database_is_one_clear_line(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "babylon", "train", "--json"],
        cwd=ROOT,
        env=os.environ
        | {"BABYLON_HOME": str(tmp_path), "DATABASE_URL": "postgresql://x@127.0.0.1:1/x"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 1
    assert finished.stderr.startswith("error: ") and finished.stderr.count("\n") == 1
    report = json.loads(finished.stdout)
    assert report["kind"] == "DatabaseError" and "127.0.0.1:1" in report["error"]


def test_help_is_quick_because_nothing_heavy_is_imported() -> None:
    started = time.monotonic()
    imported = imported_with("babylon.cli")
    assert not imported & {"torch", "transformers", "prefect", "polars", "asyncpg"}
    assert time.monotonic() - started < 5  # 0.3 s on an idle core
