"""agilerl's algorithms in their own environment; what they export plays here, without agilerl.

`make test-agilerl` runs them.
"""

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from babylon.core.numeric_manifest import read_manifest
from babylon.core.settings import Settings
from babylon.evaluation.arena.play import play
from babylon.evaluation.arena.players import unregistered_player
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.game.fleet.spawn import run_fleet
from babylon.game.market.scenario import STARTER, make_scenario
from babylon.policies.numeric_policy import load_numeric
from babylon.store import Store
from babylon.training.baselines.algorithms import ALGORITHMS
from babylon.training.baselines.train import TICKS
from tests.integration.test_replay import built, plan

PYTHON = os.environ.get("AGILERL_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs `make test-agilerl`")
ROOT = Path(__file__).parents[2]
STEPS = {"ppo": 1536} | dict.fromkeys(["neural-ucb", "neural-ts"], 64)
STEPS |= dict.fromkeys(["ippo", "maddpg", "matd3"], 240) | {"cqn": 100}
WORLDS = unseen_scenarios("test", "agilerl", 32)


def baseline(home: Path, *arguments: str) -> dict[str, Any]:
    """Run ``babylon baseline`` in agilerl's environment.

    Each home has another order of sets, which must not matter.
    """
    order = {"PYTHONHASHSEED": str(zlib.crc32(home.name.encode()))}
    done = subprocess.run(
        [str(PYTHON), "-m", "babylon", "baseline", *arguments, "--json"],
        env={**os.environ, **order, "BABYLON_HOME": str(home), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def train(home: Path, algorithm: str, generations: int, *more: str) -> dict[str, Any]:
    steps = str(STEPS.get(algorithm, 640))
    options = ("--population", "2", "--steps", steps, "--name", "b", *more)
    return baseline(
        home, "train", "--algorithm", algorithm, "--generations", str(generations), *options
    )


def trained_twice(directory: Path, algorithm: str, *more: str) -> None:
    """Train without a break and with one: both end equal, and play what the training measured."""
    whole = train(directory / "whole", algorithm, 3, *more)
    train(directory / "parts", algorithm, 1, *more)
    parts = train(directory / "parts", algorithm, 3, *more)
    assert parts["members"] == whole["members"] and len(whole["members"]) == 6
    policies = [Path(found["policy"]) for found in (whole, parts)]
    manifest = read_manifest(policies[0])
    features = np.random.default_rng(0).normal(size=(16, len(manifest.features)))
    first, second = (load_numeric(path).scores(features.astype(np.float32)) for path in policies)
    np.testing.assert_array_equal(first, second)
    validation = [make_scenario(f"baseline:{n}", STARTER) for n in range(TICKS // STARTER.ticks)]
    plays = play(unregistered_player(str(policies[0]), seed=0).enter(), validation)
    assert plays.mean_pnl == pytest.approx(manifest.pnl, abs=0.01)
    assert manifest.pnl == max(member["pnl"] for member in whole["members"])
    assert "agilerl" not in sys.modules
    print(f"{algorithm}: {manifest.pnl:+.1f} $ a world after {manifest.steps} steps")


@pytest.mark.parametrize("algorithm", [n for n, a in ALGORITHMS.items() if a.view != "recorded"])
def test_a_resumed_population_equals_an_uninterrupted_one(algorithm: str, tmp_path: Path) -> None:
    trained_twice(tmp_path, algorithm)


async def test_an_offline_algorithm_learns_from_a_dataset(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    settings = settings.replace(scoring={"scorer": "heuristic"})
    await run_fleet(store, settings, plan(agents=16), "scripted")
    await built(store, settings)
    place = settings.home.datasets
    trained_twice(tmp_path, "cqn", "--windows", "2025-11", "--from", str(place))


def test_an_elite_is_exported_and_plays_without_agilerl(tmp_path: Path) -> None:
    members = train(tmp_path, "dqn", 4)["members"]
    baseline(tmp_path, "export", "b", "--to", str(tmp_path / "mine"))
    manifest = read_manifest(tmp_path / "mine")
    assert manifest.pnl == max(member["pnl"] for member in members)
    player = unregistered_player(str(tmp_path / "mine"), seed=0)
    plays = play(player.enter(), WORLDS)
    assert plays.mean_pnl > 200.0 and not plays.malformed.any()
    assert "agilerl" not in sys.modules


@pytest.mark.parametrize("algorithm", ["neural-ucb", "neural-ts"])
def test_a_bandit_without_siblings_goes_on_after_a_generation(
    algorithm: str, tmp_path: Path
) -> None:
    members = train(tmp_path, algorithm, 2, "--population", "1")["members"]
    assert [one["generation"] for one in members] == [0, 1]
