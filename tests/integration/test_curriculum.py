"""An hour of the curriculum, played, scored and trained by the code of the real stages."""

import shutil
from math import fsum
from pathlib import Path
from typing import Any

import msgspec
import pytest

from babylon.core.learning_settings import TrainingSettings
from babylon.evaluation.arena.fitness import FitnessWorlds, fitness
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.game.market.levels import LEVELS, CurriculumLevel
from babylon.game.market.scenario import STARTER
from babylon.ops.demo import training_recipe
from benchmarks.curriculum import __main__ as program
from benchmarks.curriculum import population
from benchmarks.curriculum.hours import Moved, Window, learn
from benchmarks.curriculum.play import Sampler, look, played, unseen, wealth_after, worlds_of
from benchmarks.curriculum.results import RunKey
from benchmarks.curriculum.updates import own_update


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
    place: dict[str, Any] = {
        "seed": 0,
        "agents": 8,
        "looks": (),
        "directory": tmp_path,
        "update": own_update,
    }
    [(hour, policy)] = learn(level, embedded_model, training, hours=1, **place)
    assert (hour.level, hour.hour) == ("L0", 0) and (hour.kl_after or 0) > 0 and policy.exists()
    again, (second, newest) = learn(level, embedded_model, training, hours=2, **place)
    assert again == (hour, policy) and (second.hour, newest.name) == (1, "1")
    assert not policy.exists() and newest.exists()
    assert hour.fleet_pnl == pytest.approx(fsum(one.pnl_usd for one in own) / 8)


def test_agents_of_a_shared_level_keep_their_wealth(embedded_model: Path, tmp_path: Path) -> None:
    level = CurriculumLevel(name="shared", lesson="", regimes=(STARTER,), shared=True)
    met: list[Window] = []

    def copied(window: Window, _: TrainingSettings, target: Path) -> Moved:
        met.append(window)
        shutil.copytree(window.policy, target)
        return Moved()

    place: dict[str, Any] = {
        "seed": 0,
        "agents": 8,
        "looks": (),
        "directory": tmp_path,
        "update": copied,
    }
    [*learn(level, embedded_model, TrainingSettings(), hours=1, **place)]
    [(first, _), (second, _)] = learn(level, embedded_model, TrainingSettings(), hours=2, **place)
    assert first.wealth == pytest.approx([1000 + own.pnl_usd for own in met[0].play])
    assert min(first.wealth) < 1000
    for opening, own in zip(first.wealth, met[1].play, strict=True):
        assert f"${opening:.0f}" in str(own.calls[0].messages[-1]["content"])
    assert sum(second.wealth) == pytest.approx(
        sum(first.wealth) + sum(own.pnl_usd for own in met[1].play)
    )
    ruined = msgspec.structs.replace(met[0].play[0], pnl_usd=-900.0)
    assert wealth_after(STARTER, [ruined], ()) == [1000]  # it cannot pay the largest order


def test_a_shared_level_is_looked_at_with_all_seats(embedded_model: Path) -> None:
    level = CurriculumLevel(name="shared", lesson="", regimes=(STARTER,), shared=True)
    own = look(level, 0, embedded_model, 2)
    assert own.decisions.total() == 2 * 8 * STARTER.ticks and own.pnl.shape == (2,)


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
