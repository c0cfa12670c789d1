"""agilerl's algorithms in their own environment; what they export plays here, without agilerl.

`make test-agilerl` runs them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from babylon.core.numeric_manifest import read_manifest
from babylon.evaluation.arena.play import play
from babylon.evaluation.arena.players import unregistered_player
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.policies.numeric_policy import load_numeric

PYTHON = os.environ.get("AGILERL_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs `make test-agilerl`")
ROOT = Path(__file__).parents[2]
STEPS = {"ppo": 1536, "neural-ucb": 64, "ippo": 240, "maddpg": 240}
WORLDS = unseen_scenarios("test", "agilerl", 32)


def baseline(home: Path, *arguments: str) -> dict[str, Any]:
    """Run ``babylon baseline`` in agilerl's environment."""
    done = subprocess.run(
        [str(PYTHON), "-m", "babylon", "baseline", *arguments, "--json"],
        env={**os.environ, "BABYLON_HOME": str(home), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def train(home: Path, algorithm: str, generations: int) -> dict[str, Any]:
    steps = str(STEPS.get(algorithm, 640))
    options = ("--population", "2", "--steps", steps, "--name", "b")
    return baseline(
        home, "train", "--algorithm", algorithm, "--generations", str(generations), *options
    )


@pytest.mark.parametrize("algorithm", ["dqn", "rainbow", "td3", "ppo", "maddpg", "neural-ucb"])
def test_a_resumed_population_equals_an_uninterrupted_one(algorithm: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", algorithm, 3)
    train(tmp_path / "parts", algorithm, 1)
    parts = train(tmp_path / "parts", algorithm, 3)
    assert parts["members"] == whole["members"] and len(whole["members"]) == 6
    policies = [Path(found["policy"]) for found in (whole, parts)]
    features = (
        np.random.default_rng(0)
        .normal(size=(16, len(read_manifest(policies[0]).features)))
        .astype(np.float32)
    )
    first, second = (load_numeric(path).scores(features) for path in policies)
    np.testing.assert_array_equal(first, second)


def test_an_elite_is_exported_and_plays_without_agilerl(tmp_path: Path) -> None:
    members = train(tmp_path, "dqn", 4)["members"]
    baseline(tmp_path, "export", "b", "--to", str(tmp_path / "mine"))
    manifest = read_manifest(tmp_path / "mine")
    assert manifest.pnl == max(member["pnl"] for member in members)
    player = unregistered_player(str(tmp_path / "mine"), seed=0)
    plays = play(player.enter(), WORLDS)
    assert plays.mean_pnl > 200.0 and not plays.malformed.any()
    assert "agilerl" not in sys.modules
