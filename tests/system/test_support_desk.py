"""The example of a whole task, from a home with a base model to better policies."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from babylon.training.base_model import EmbeddedModelRecipe

PROGRAM = Path(__file__).parents[2] / "examples" / "support_desk.py"


@pytest.mark.slow
def test_the_support_desk_learns_and_deploys(tmp_path: Path, embedded_model: Path) -> None:
    shutil.copytree(embedded_model, tmp_path / "home" / "models" / EmbeddedModelRecipe().name)
    outside = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=outside | {"BABYLON_HOME": str(tmp_path / "home")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    hours = [line.split(maxsplit=3) for line in run.stdout.splitlines() if line.startswith("2026-")]
    assert len(hours) == 4, run.stdout
    assert {status for _, status, *_ in hours} <= {"deployed", "rejected"}, run.stdout
    # The base guesses. In each hour a gain of a tenth of all tickets is likely and can be seen.
    assert any(status == "deployed" for _, status, *_ in hours), run.stdout
