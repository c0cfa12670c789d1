"""What can be known of the baselines without agilerl."""

import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from babylon.core.errors import ConfigError, ModelError
from babylon.game.envs.worlds import from_scenarios
from babylon.game.market.scenario import make_scenario
from babylon.training.baselines.algorithms import ALGORITHMS
from babylon.training.baselines.export import GreedyScores, play_greedily
from babylon.training.baselines.train import BaselineRun, export_elite, train_baseline
from babylon.training.baselines.views import SharedMarket, TraderBandit, make_view, spaces_of


@pytest.mark.parametrize("rules", ["starter", "hour"])
@pytest.mark.parametrize("name", ["dqn", "td3", "maddpg", "ippo", "neural-ucb"])
def test_every_view_takes_what_its_space_samples(name: str, rules: str) -> None:
    env = make_view(ALGORITHMS[name], rules, seed=0)
    _, action = spaces_of(env)
    if isinstance(env, TraderBandit):
        contexts, payoff = env.step(int(action.sample()))
        assert contexts.shape == (env.arms, *env.single_observation_space.shape)
        assert contexts in _batched(env) and isinstance(payoff, float)
    elif isinstance(env, SharedMarket):
        _, rewards, *_ = env.step({n: env.action_space(n).sample() for n in env.agents})
        assert rewards.keys() == {"trader_0", "trader_1"}
    else:
        observations, rewards, *_ = env.step(env.action_space.sample())
        assert observations in env.observation_space and rewards.shape == (64,)


def _batched(env: TraderBandit) -> object:
    from gymnasium.vector.utils import batch_space

    return batch_space(env.single_observation_space, env.arms)


class _Bandit:
    """An agent whose network prefers an arm by the number of a feature."""

    action_dim = 19

    def __init__(self) -> None:
        self.actor = torch.nn.Linear(25 + 19, 1, bias=False)
        with torch.no_grad():
            self.actor.weight[:] = torch.arange(44.0)


def test_a_bandits_scores_are_those_of_its_arms_contexts() -> None:
    module = GreedyScores(_Bandit(), ALGORITHMS["neural-ucb"])
    env = TraderBandit("starter", seed=1)
    contexts = env.reset()
    alone = _Bandit().actor(torch.from_numpy(contexts)).reshape(1, -1)
    features = torch.from_numpy(contexts[:1, :25])
    torch.testing.assert_close(module(features), alone)
    torch.testing.assert_close(module(features.repeat(3, 1)), alone.repeat(3, 1))


def test_fitness_is_the_pnl_of_the_greedy_policy() -> None:
    """The last entry of the menu sells what is not held: nothing happens."""
    module = GreedyScores(_Bandit(), ALGORITHMS["neural-ucb"])
    worlds = from_scenarios([make_scenario(number) for number in range(4)])
    assert (play_greedily(module, ALGORITHMS["neural-ucb"], worlds) == np.zeros(4)).all()
    with torch.no_grad():
        module.network.weight[0, 25 + 2] = 100.0  # buys YES of the first question
    bought = play_greedily(module, ALGORITHMS["neural-ucb"], worlds)
    right = [s.questions[0].outcome.value == "YES" for s in map(make_scenario, range(4))]
    assert [pnl > 0 for pnl in bought] == right and 0 < sum(right) < 4


def test_without_agilerl_or_an_elite_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "agilerl", None)
    with pytest.raises(ConfigError, match=r"install babylon-rl\[agilerl\] into an environment"):
        train_baseline(tmp_path / "a", BaselineRun(algorithm="dqn"), 1)
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match="'sarsa' is unknown: choose from dqn, rainbow"):
        train_baseline(tmp_path, BaselineRun(algorithm="sarsa"), 1)
    with pytest.raises(ConfigError, match="learns from recorded play: give --windows"):
        train_baseline(tmp_path, BaselineRun(algorithm="cqn"), 1)
    with pytest.raises(ModelError, match="holds no trained baseline"):
        export_elite(tmp_path, tmp_path / "policy")


def test_a_run_does_not_go_on_with_other_recorded_windows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("babylon.training.baselines.train._require_agilerl", lambda: None)
    run = BaselineRun(algorithm="dqn", windows="2026-01")
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(run))
    with pytest.raises(ConfigError, match=r"windows='2026-01'.*windows='2026-02'.*another --name"):
        train_baseline(tmp_path, replace(run, windows="2026-02"), 1)


@pytest.mark.parametrize("damaged", ["run.json", "state.pt"])
def test_a_file_that_a_loss_of_power_damaged_is_named(
    damaged: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("babylon.training.baselines.train._require_agilerl", lambda: None)
    run = BaselineRun(algorithm="dqn")
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(run))
    (tmp_path / damaged).write_bytes(b"garbage")
    with pytest.raises(ModelError, match=f"{damaged} does not load .*: remove it and train again"):
        train_baseline(tmp_path, run, 1)
