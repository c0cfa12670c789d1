"""An hour of the curriculum, played, scored and trained by the code of the real stages."""

from math import fsum
from pathlib import Path

import pytest

from babylon.core.learning_settings import TrainingSettings
from babylon.evaluation.arena.fitness import FitnessWorlds, fitness
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.game.market.levels import LEVELS
from babylon.ops.demo import training_recipe
from benchmarks.curriculum import __main__ as program
from benchmarks.curriculum import population
from benchmarks.curriculum.hours import Sampler, learn, played, unseen, worlds_of
from benchmarks.curriculum.results import RunKey


def test_levels_have_worlds_of_their_own_and_regimes_follow_each_other() -> None:
    switching = LEVELS["L5"]
    assert switching.rules(0) == switching.rules(11) == switching.rules(36)
    assert len({switching.rules(hour) for hour in (0, 12, 24)}) == 3
    for level in LEVELS.values():
        trained = {world.scenario_id for world in worlds_of(level, 0, 0, 4)}
        assert not trained & {world.scenario_id for world in unseen(level, 0, 4)}
        assert len(trained) == 4


def test_an_hour_is_played_and_trained(embedded_model: Path, tmp_path: Path) -> None:
    level = LEVELS["L0"]
    own = played(Sampler(str(embedded_model)), worlds_of(level, 0, 0, 1), 0, level.shared)
    assert len(own) == 8
    for one in own:
        assert fsum(payoff.pnl_usd for payoff in one.payoffs) == pytest.approx(one.pnl_usd)
        assert [call.step for call in one.calls] == [payoff.step for payoff in one.payoffs]
        assert all(len(c.logprobs or ()) == len(c.completion_token_ids or ()) for c in one.calls)
    training = TrainingSettings.model_validate(training_recipe(level.rules(0)))
    [(hour, policy)] = learn(
        level, embedded_model, training, seed=0, hours=1, agents=8, looks=(), directory=tmp_path
    )
    assert (hour.level, hour.hour) == ("L0", 0) and (hour.kl_after or 0) > 0 and policy.exists()
    goes_on = learn(
        level, embedded_model, training, seed=0, hours=2, agents=8, looks=(), directory=tmp_path
    )
    again, (second, newest) = list(goes_on)
    assert again == (hour, policy) and (second.hour, newest.name) == (1, "1")
    assert not policy.exists() and newest.exists()
    assert hour.fleet_pnl == pytest.approx(fsum(one.pnl_usd for one in own) / 8)


def test_the_fittest_of_a_population_goes_on(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(population, "FITNESS_WORLDS", 16)
    key = RunKey(
        level="L0", arm="population", seed=0, hours=1, agents=8, worlds=1, base=embedded_model.name
    )
    [(hour, policy)] = program._learner(key, embedded_model, (), tmp_path)
    gains = [gain for gain in hour.gains if gain is not None]  # some siblings may be unfit
    assert len(hour.gains) == len(population.FOUNDERS) and min(gains) < max(gains)
    fresh = unseen_scenarios("fitness", "curriculum:L0:0:0", 16, LEVELS["L0"].rules(0))
    worlds = FitnessWorlds(scenarios=tuple(fresh), seats=1)
    parent, kept = (worlds.played_by(str(path), 0) for path in (embedded_model, policy))
    assert fitness(parent, kept).mean == pytest.approx(max(gains))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["0", "hours.jsonl"]
    [(again, _)] = program._learner(key, embedded_model, (), tmp_path)
    assert again == hour and policy.exists()


def test_a_base_that_reads_words_learns_from_them(embedded_model: Path, tmp_path: Path) -> None:
    common = ["--level", "L0", "--hours", "1", "--agents", "8", "--base", str(embedded_model)]
    program.main([*common, "--reader", str(tmp_path)])
    [made] = tmp_path.iterdir()
    key = RunKey(
        level="L0",
        arm="ours",
        seed=0,
        hours=1,
        agents=8,
        worlds=1,
        base=made.name,
        settings=("objective=sdpo", "preferences.words=0.5"),
    )
    (tmp_path / "run").mkdir()
    [(hour, _)] = program._learner(key, made, (), tmp_path / "run")
    assert (hour.kl_after or 0) > 0
