import json
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from babylon.game.envs import IDS, TraderEnv
from babylon.game.envs.actions import LEVERAGES
from babylon.game.envs.observation import feature_names
from babylon.game.market.account import PerpFill
from babylon.game.market.amm import Side
from babylon.game.market.orders import Order, OrderKind, parse_decision
from babylon.game.market.prompts import names_of, render_observation
from babylon.game.market.scenario import HOUR, STARTER, Question, Scenario, make_scenario
from tests.worlds import perp, quiet_world

HOLD = np.array([0, 0, 0])


@pytest.mark.parametrize("env_id", IDS)
def test_gymnasium_accepts_the_environment(env_id: str) -> None:
    """Its warnings are errors here."""
    check_env(gymnasium.make(env_id).unwrapped)


def env_of(scenario: Scenario, **options: Any) -> TraderEnv:
    env = TraderEnv(scenario.rules, **options)
    env.reset(options={"scenario": scenario})
    return env


def test_rewards_add_up_to_the_pnl_in_hundreds_of_dollars() -> None:
    env = TraderEnv("hour")
    env.reset(seed=1)
    env.action_space.seed(1)
    rewards, ended = [], False
    while not ended:
        _, reward, ended, truncated, info = env.step(env.action_space.sample())
        rewards.append(reward)
        assert not truncated
    assert len(rewards) == HOUR.ticks
    assert sum(rewards) * 100 == pytest.approx(info["pnl"])
    assert info["pnl"] == env.game.balance - 1000 != 0


def test_a_seed_is_a_scenario() -> None:
    env = TraderEnv("starter")
    worlds = [env.reset(seed=seed)[1]["scenario_id"] for seed in (1, 2, 1)]
    assert worlds[0] == worlds[2] != worlds[1]
    assert env.reset()[1]["scenario_id"] != worlds[2]


def flipped(scenario: Scenario) -> Scenario:
    """The same world as far as anybody can see, in which everything ends the other way."""
    questions = tuple(replace(q, outcome=q.outcome.other) for q in scenario.questions)
    return replace(scenario, questions=questions)


def test_outcomes_are_not_observed_before_their_question_resolves() -> None:
    scenario = make_scenario(4, HOUR)
    envs = [env_of(world, render_mode="ansi") for world in (scenario, flipped(scenario))]
    envs[0].action_space.seed(4)
    first_resolution = min(q.resolves_at or HOUR.ticks for q in scenario.questions)
    assert 1 < first_resolution < HOUR.ticks
    for tick in range(1, first_resolution + 1):
        action = envs[0].action_space.sample()
        (one, one_reward, *_, one_info), (two, two_reward, *_, two_info) = (
            env.step(action) for env in envs
        )
        if tick < first_resolution:
            np.testing.assert_array_equal(one, two)
            assert one_reward == two_reward and one_info == two_info
            assert envs[0].render() == envs[1].render()
    assert not np.array_equal(one, two)  # now it is known


def test_prices_to_come_are_not_observed() -> None:
    calm, wild = (
        env_of(quiet_world(perps=[perp(10.0, 10.0, later, later)], ticks=3))
        for later in (10.0, 99.0)
    )
    np.testing.assert_array_equal(calm.step(HOLD)[0], wild.step(HOLD)[0])
    assert not np.array_equal(calm.step(HOLD)[0], wild.step(HOLD)[0])


def test_features_are_what_their_names_say() -> None:
    questions = [Question("m1", "?", Side.YES, resolves_at=1), Question("m2", "?", Side.NO)]
    scenario = quiet_world(*questions, perps=[perp(10.0, 11.0, 11.0, 11.0, 11.0, rate=1e-4)])
    env = env_of(scenario)
    env.play(Order("OPNAI", OrderKind.OPEN_LONG, 100.0, leverage=2.0))
    observation, *_ = env.play(Order("m2", OrderKind.BUY_NO, 100.0))
    seen = dict(zip(feature_names(2, 1), observation.tolist(), strict=True))
    assert {name: pytest.approx(value, abs=1e-4) for name, value in seen.items()} == {
        "share of the ticks left": 0.5,
        "share of the time to funding": 1 - 62 / 480,
        "balance": 0.85,
        "equity": 1.01,
        "m1: P(YES)": 1.0,  # it has resolved
        "m2: P(YES)": 0.4098,
        "m1: open": 0.0,
        "m2: open": 1.0,
        "m1: share of the ticks until it resolves": 0.0,
        "m2: share of the ticks until it resolves": 0.5,
        "m1: news": 0.0,
        "m2: news": 0.0,
        "m1: news so far": 0.0,
        "m2: news so far": 0.0,
        "m1: YES shares": 0.0,
        "m2: YES shares": 0.0,
        "m1: NO shares": 0.0,
        "m2: NO shares": 0.1833,
        "perp 1: price since the start, percent": 10.0,
        "perp 1: last move, percent": 0.0,
        "perp 1: funding rate, percent": 0.01,
        "perp 1: news": 0.0,
        "perp 1: news so far": 0.0,
        "perp 1: long size": 0.1,
        "perp 1: short size": 0.0,
        "perp 1: margin": 0.05,
        "perp 1: profit": 0.01,
    }


def test_headlines_are_observed_as_good_or_bad() -> None:
    scenario = make_scenario(0, HOUR)
    env, names = env_of(scenario), feature_names(5, 5)
    topics = [q.market_id for q in scenario.questions] + [p.ticker for p in scenario.perps]
    columns = [names.index(f"{topic}: news") for topic in topics[:5]]
    columns += [names.index(f"perp {number}: news") for number in range(1, 6)]
    for news in scenario.news[1:10]:
        observation, *_ = env.step(HOLD)
        told = dict(zip(topics, observation[columns], strict=True))
        expected = dict.fromkeys(topics, 0.0)
        assert news is not None
        expected[news.market_id] = 1.0 if news.hints is Side.YES else -1.0
        assert told == expected


@pytest.mark.parametrize(
    ("action", "fill"),
    [([1, 3, 0], ("BUY_SHARES", Side.YES, 150.0)), ([2, 0, 0], ("BUY_SHARES", Side.NO, 37.5))],
)
def test_a_buy_takes_quarters_of_maximum(action: list[int], fill: tuple[str, Side, float]) -> None:
    env = env_of(quiet_world(perps=[perp(*[10.0] * 5)]))
    env.step(np.array(action))
    outcome = env.game.outcomes[-1]
    assert (outcome.action_type, outcome.side, outcome.dollars) == fill


def test_selling_takes_quarters_of_what_is_held_and_closing_takes_all() -> None:
    env = env_of(quiet_world(perps=[perp(*[10.0] * 5)]))
    env.step(np.array([1, 3, 0]))
    held = env.game.outcomes[-1].shares
    env.step(np.array([3, 1, 0]))
    assert env.game.outcomes[-1].shares == held / 2
    env.step(np.array([5, 3, 2]))
    assert env.game.positions
    env.step(np.array([6, 0, 0]))
    assert env.game.outcomes[-1].success and not env.game.positions


@pytest.mark.parametrize("level", range(len(LEVERAGES)))
def test_an_opening_takes_its_part_of_the_largest_order_fee_included(level: int) -> None:
    env = env_of(quiet_world(perps=[perp(*[10.0] * 5)], fee=0.001))
    env.step(np.array([4, 3, level]))
    fill = env.game.outcomes[-1].perp
    assert isinstance(fill, PerpFill)
    assert fill.leverage == LEVERAGES[level]
    paid = fill.size / fill.leverage + fill.fee
    assert 150 - 0.02 <= paid <= 150 and paid == pytest.approx(1000 - env.game.balance)


def test_an_order_of_nothing_is_refused_and_costs_the_tick() -> None:
    env = env_of(quiet_world(ticks=2))
    *_, info = env.step(np.array([3, 3]))
    assert info["action_type"] == "TRADING_DECISION" and not info["success"]
    assert "amount 0 is not a positive number" in info["error"]
    assert env.game.tick == 1


def test_a_reply_in_words_is_a_step() -> None:
    """Prompt of an LLM agent, and the step that its reply makes."""
    env = TraderEnv("hour", render_mode="ansi")
    env.reset(seed=3)
    chat = render_observation(env.game, *names_of(env.game.scenario, 1))
    assert "You are agent-" in chat[1]["content"]
    assert env.render() == "\n\n".join(message["content"] for message in chat)
    trade = {"type": "prediction", "market": "m1", "action": "buy_yes", "amount": 50}
    reply = json.dumps({"action": "trade", "trade": trade})
    *_, info = env.play(parse_decision(reply))
    assert info["success"] and "m1 YES" in str(env.render())
    *_, info = env.play(parse_decision("buy!"))
    assert "malformed reply" in info["error"] and "Your last action failed" in str(env.render())
    assert TraderEnv("hour").render() is None


def test_opponents_of_the_rules_trade_in_the_market() -> None:
    env = TraderEnv(replace(STARTER, noise_order=0.0, opponents=("random", "news")))
    observation, _ = env.reset(seed=0)
    later, *_ = env.step(np.array([0, 0]))
    probabilities = slice(4, 7)
    assert not np.array_equal(observation[probabilities], later[probabilities])


def test_what_cannot_be_made_says_why() -> None:
    with pytest.raises(ValueError, match="rules 'day' are unknown: choose from starter, hour"):
        TraderEnv("day")
    with pytest.raises(ValueError, match="has 3 questions and 0 perps, not 5 and 5"):
        TraderEnv("hour").reset(options={"scenario": make_scenario(0, STARTER)})
