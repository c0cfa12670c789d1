from dataclasses import replace

import numpy as np
import pytest
from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test, seed_test
from pettingzoo.utils import parallel_to_aec

from babylon.game.envs import MarketEnv
from babylon.game.market.prompts import names_of
from babylon.game.market.scenario import HOUR, STARTER, make_scenario

BUY_YES_OF_THE_FIRST = np.array([1, 3, 0])
HOLD = np.array([0, 0, 0])


@pytest.mark.parametrize("rules", ["hour", "starter"])
def test_pettingzoo_accepts_the_environment(rules: str) -> None:
    """Its warnings are errors here."""
    parallel_api_test(MarketEnv(traders=3, rules=rules), num_cycles=100)
    parallel_seed_test(lambda: MarketEnv(traders=3, rules=rules))


# it warns of every space but Box and Discrete
@pytest.mark.filterwarnings("ignore:Action space for each agent probably should be")
def test_pettingzoo_accepts_it_turn_by_turn() -> None:
    api_test(parallel_to_aec(MarketEnv(traders=2)), num_cycles=150)
    seed_test(lambda: parallel_to_aec(MarketEnv(traders=2)), num_cycles=100)


def test_traders_move_the_prices_of_each_other() -> None:
    def price_after(action: np.ndarray) -> float:
        env = MarketEnv(traders=2)
        env.reset(seed=0)
        observations, *_ = env.step({"trader_0": action, "trader_1": HOLD})
        assert observations["trader_0"][4] == observations["trader_1"][4]
        return float(observations["trader_1"][4])

    assert price_after(BUY_YES_OF_THE_FIRST) > price_after(HOLD)


def test_all_decide_by_the_same_state() -> None:
    """Both stake what the same balance allows, whoever is carried out first."""
    env = MarketEnv(traders=2)
    env.reset(seed=0)
    env.step(dict.fromkeys(env.agents, BUY_YES_OF_THE_FIRST))
    stakes = {seat.outcomes[-1].dollars for seat in env.seats.values()}
    assert stakes == {150.0}
    assert len({seat.outcomes[-1].shares for seat in env.seats.values()}) == 2


def test_rewards_add_up_to_each_pnl_and_all_end_together() -> None:
    env = MarketEnv(traders=3)
    env.reset(seed=2)
    for number, agent in enumerate(env.agents):
        env.action_space(agent).seed(number)
    totals = dict.fromkeys(env.agents, 0.0)
    ticks = 0
    while env.agents:
        actions = {agent: env.action_space(agent).sample() for agent in env.agents}
        _, rewards, terminated, truncated, infos = env.step(actions)
        totals = {agent: totals[agent] + rewards[agent] for agent in totals}
        ticks += 1
    assert ticks == HOUR.ticks
    assert all(terminated.values()) and not any(truncated.values())
    for agent, total in totals.items():
        assert total * 100 == pytest.approx(infos[agent]["pnl"])
    assert len({round(total, 6) for total in totals.values()}) == 3


def test_the_prompts_of_all_traders_are_rendered() -> None:
    env = MarketEnv(traders=2, render_mode="ansi")
    env.reset(seed=0)
    text = str(env.render())
    first, second = names_of(env.market.scenario, 2)
    assert f"You are {first}." in text and f"You are {second}." in text and "trader" not in text
    assert MarketEnv().render() is None


def test_a_given_scenario_is_played_by_its_own_rules() -> None:
    env = MarketEnv(traders=2, rules="starter")
    scenario = make_scenario(1, replace(STARTER, ticks=2))
    _, infos = env.reset(options={"scenario": scenario})
    assert infos["trader_1"] == {"scenario_id": scenario.scenario_id}
    env.step(dict.fromkeys(env.agents, HOLD[:2]))
    _, _, terminated, _, _ = env.step(dict.fromkeys(env.agents, HOLD[:2]))
    assert terminated == {"trader_0": True, "trader_1": True} and env.agents == []


def test_a_step_before_and_after_a_play_names_the_remedy() -> None:
    env = MarketEnv(traders=2, rules="starter")
    with pytest.raises(ValueError, match=r"no play is on, .*: call reset\(\) first"):
        env.step({})
    env.reset(seed=0)
    while env.agents:
        env.step(dict.fromkeys(env.agents, HOLD[:2]))
    with pytest.raises(ValueError, match=r"call reset\(\) first"):
        env.step({})


def test_every_trader_acts_in_every_tick() -> None:
    env = MarketEnv(traders=2)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="no action for trader_1"):
        env.step({"trader_0": HOLD})
