"""The day on a GPU, rehearsed on the CPU: its parts at tiny sizes, and its table."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_day import __main__ as day
from benchmarks.gpu_day.head import measure_heads
from benchmarks.gpu_day.models import policy_kind
from benchmarks.gpu_day.parts import Place, train
from benchmarks.gpu_day.peers import measure_peers


@pytest.mark.parametrize("size", ["0.5b", "7b"])
def test_updates_are_measured_through_the_products_own_function(tmp_path: Path, size: Any) -> None:
    found = train(Place(directory=tmp_path, rehearse=True), size)
    assert (tmp_path / "next" / "config.json").exists() is (size == "0.5b")
    assert found["oom_halvings"] == 0
    assert all(float(found[name]) > 0 for name in ("s_an_iteration", "unique_token_mfu"))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", ["0.5b", "7b"])
def test_a_pass_is_measured_beside_trl_where_it_is_installed(size: Any) -> None:
    found = measure_peers(policy_kind(size, rehearse=True), rehearse=True)
    assert float(found["ours_s"]) > 0  # type: ignore[arg-type]
    assert found.get("trl") == "not installed" or float(found["gradient_gap"]) < 1e-5  # type: ignore[arg-type]


def test_heads_are_measured_beside_the_exact_one() -> None:
    """Liger and Cut Cross-Entropy are no dependencies."""
    found = measure_heads(rehearse=True)
    assert found["fp32_error"] == 0
    assert 1e-5 < float(found["bf16_error"]) < 0.01  # type: ignore[arg-type]
    assert found.get("liger") == "not installed (liger_kernel)" or "liger_error" in found


def test_a_second_call_runs_only_what_has_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran, status = [], {"train-7b": "failed"}

    def run(part: str, directory: Path, *, rehearse: bool) -> dict[str, Any]:
        ran.append(part)
        return {"status": status.get(part, "passed"), "seconds": 2.0, "figures": {"mfu": 0.25}}

    monkeypatch.setattr(day, "run_part", run)
    monkeypatch.setattr(sys, "argv", ["gpu_day", "--directory", str(tmp_path)])
    assert day.main() == 1
    assert ran == list(day.PARTS)
    status.clear()
    assert day.main() == 0
    assert ran[len(day.PARTS) :] == ["train-7b"]
    assert "| train-7b | passed | 2 | mfu 0.25 |" in (tmp_path / "table.md").read_text()


def test_a_part_that_fails_or_takes_too_long_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(day, "LIMIT_S", 0.01)
    assert day.run_part("train-7b", tmp_path, rehearse=True)["status"] == "out of time"


@pytest.mark.slow
def test_the_parts_that_serve_are_rehearsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their services are processes. The tests above measure the other parts in this one."""
    parts = ["tests", "parity", "swap", "gate", "hour-0.5b", "hour-7b"]
    monkeypatch.setattr(
        sys, "argv", ["gpu_day", "--directory", str(tmp_path), "--rehearse", *parts]
    )
    status = day.main()
    logs = "\n".join(path.read_text()[-2000:] for path in sorted(tmp_path.glob("*.log")))
    assert status == 0, logs
    gate = json.loads((tmp_path / "gate.json").read_text())["figures"]
    assert gate["equal_replies"] == 1 and gate["model_bytes_in_this_process"] == 0
