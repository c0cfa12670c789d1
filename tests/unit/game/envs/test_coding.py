"""Codes of actions there and back, payoffs as rewards, and exported policies in the seats."""

import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest

from babylon.core.errors import ModelError
from babylon.core.numeric_manifest import MANIFEST, PROGRAM, Coding
from babylon.game.envs import MarketEnv, TraderEnv, TraderVectorEnv
from babylon.game.envs.actions import LEVERAGES, SIZES, to_decision, to_orders
from babylon.game.envs.coding import action_of, chosen, code_space, decode, encode, menu
from babylon.game.envs.ledger import ledger_of
from babylon.game.envs.numeric_play import numeric_decisions
from babylon.game.market.amm import Side
from babylon.game.market.game import Game
from babylon.game.market.orders import Hold, Order, OrderKind, Post, parse_decision, render_decision
from babylon.game.market.scenario import HOUR, STARTER, Rules, make_scenario
from babylon.game.market.scripted import SCRIPTED_AGENTS
from tests.exported import exported, news_buyer

SIZES_OF = {"starter": (3, 0), "hour": (5, 5)}


@pytest.mark.parametrize("rules", SIZES_OF)
def test_every_entry_of_the_menu_is_its_own_code(rules: str) -> None:
    sizes = SIZES_OF[rules]
    entries = menu(*sizes)
    assert len(entries) == {"starter": 19, "hour": 76}[rules]
    assert len(np.unique(entries, axis=0)) == len(entries)
    assert all(entry in TraderEnv(rules).action_space for entry in entries)
    codes = np.arange(len(entries))
    assert (encode("menu", decode("menu", codes, *sizes), *sizes) == codes).all()
    assert (chosen("menu", np.eye(len(entries)), *sizes) == entries).all()


@pytest.mark.parametrize("rules", SIZES_OF)
def test_every_action_can_be_dialled(rules: str) -> None:
    sizes = SIZES_OF[rules]
    space = TraderEnv(rules).action_space
    actions = np.stack(np.meshgrid(*map(np.arange, space.nvec), indexing="ij"), -1)
    codes = encode("dials", actions, *sizes)
    assert codes[0, 0].reshape(-1, codes.shape[-1])[0] in code_space("dials", *sizes)
    assert (decode("dials", codes, *sizes) == actions).all()
    edges = np.ones((2, codes.shape[-1]), np.float32) * [[-1.0], [1.0]]
    assert all(action in space for action in decode("dials", edges, *sizes))


@pytest.mark.parametrize("coding", ["menu", "dials"])
def test_a_recorded_decision_has_a_code_that_does_about_the_same(coding: Coding) -> None:
    """The verb is the same, and the amount is near: the menu has halves, the dials quarters."""
    random, seen = Random(0), set[OrderKind]()
    for number in range(30):
        agent = SCRIPTED_AGENTS[random.choice(["random", "maker", "momentum"])]
        game = Game(make_scenario(number, Rules(markets=5, ticks=12, perps=5)))
        while not game.over:
            decision = parse_decision(render_decision(agent(game, random)))
            code = encode(coding, action_of(game, decision), 5, 5)
            ledger = ledger_of(game.market, ["player"])
            orders = to_orders(decode(coding, code, 5, 5)[None, None], ledger, game.scenario.rules)
            coded = to_decision(orders, 0, game.scenario)
            if isinstance(decision, Order) and isinstance(coded, Order):
                assert (coded.market, coded.kind) == (decision.market, decision.kind)
                seen.add(coded.kind)
                if not coded.kind.is_perp and coded.kind is not OrderKind.SELL:
                    part = 0.126 if coding == "dials" else 0.334
                    assert abs(coded.amount - decision.amount) <= part * 150.0
            else:
                assert isinstance(decision, Hold) and isinstance(coded, Hold)
            game.act(decision)
    assert seen >= {OrderKind.BUY_YES, OrderKind.OPEN_LONG, OrderKind.CLOSE}
    hold = encode("menu", action_of(Game(make_scenario(0)), Post("a quiet minute")), 3, 0)
    assert hold == 0


def test_leverage_and_size_of_a_perp_are_kept() -> None:
    game = Game(make_scenario(1, HOUR))
    ticker = game.scenario.perps[2].ticker
    for size in range(SIZES):
        for number, leverage in enumerate(LEVERAGES):
            action = np.array([1 + 15 + 3 * 2, size, number])
            orders = to_orders(action[None, None], ledger_of(game.market, ["player"]), HOUR)
            order = to_decision(orders, 0, game.scenario)
            assert isinstance(order, Order) and order.market == ticker
            assert order.leverage == leverage
            assert (action_of(game, order) == action).all()


def test_an_order_beyond_all_money_is_one_of_the_whole() -> None:
    game = Game(make_scenario(1))
    game.account.balance = 0.25
    order = parse_decision(render_decision(Order("m1", OrderKind.BUY_YES, 1e308)))
    assert action_of(game, order).tolist() == [1, SIZES - 1]


@pytest.mark.parametrize("rules", ["starter", "hour"])
def test_payoffs_add_up_to_the_pnl_and_come_with_the_order(rules: str) -> None:
    """Of many worlds, of one market, and of one trader in both reward schemes."""
    plain, paid = (TraderVectorEnv(16, rules, worlds=8, payoff=payoff) for payoff in (False, True))
    for env in (plain, paid):
        env.reset(seed=3)
    plain.action_space.seed(0)
    sums = np.zeros((2, 16))
    while True:
        actions = plain.action_space.sample()
        (_, first, over, _, info), (_, second, *_) = plain.step(actions), paid.step(actions)
        sums += first, second
        if over.any():
            break
        held = actions[:, 0] == 0
        if rules == "starter":  # a perp's payoff changes if it is liquidated
            assert np.abs(second[held]).max(initial=0.0) < 1e-9
    np.testing.assert_allclose(sums * 100.0, [info["final_info"]["pnl"]] * 2, atol=1e-6)
    market = MarketEnv(3, rules, payoff=True)
    market.reset(seed=5)
    total = dict.fromkeys(market.possible_agents, 0.0)
    while market.agents:
        chosen_actions = {name: market.action_space(name).sample() for name in market.agents}
        _, rewards, _, _, infos = market.step(chosen_actions)
        total = {name: total[name] + reward for name, reward in rewards.items()}
    assert {n: 100.0 * s for n, s in total.items()} == pytest.approx(
        {n: infos[n]["pnl"] for n in total}, abs=1e-6
    )


def test_an_exported_policy_plays_as_in_the_environment_and_without_agilerl(tmp_path: Path) -> None:
    decide = numeric_decisions(news_buyer(tmp_path / "policy"))
    env = TraderEnv("starter")
    bought = 0
    for seed in range(4):
        scenario = make_scenario(seed)
        game = Game(scenario, "trader")
        observation, _ = env.reset(options={"scenario": scenario})
        for news in scenario.news:
            (decision,) = decide([game])
            assert decide([env.game]) == [decision]
            names = [f"m{n}" for n in range(1, 4)]
            column = {name: 4 + 9 + names.index(name) for name in names}
            if news is None:
                assert isinstance(decision, Hold)
            else:
                market = scenario.questions[names.index(news.market_id)].market_id
                assert isinstance(decision, Order) and decision.market == market
                assert observation[column[news.market_id]] == (1 if news.hints is Side.YES else -1)
                assert decision.kind.value == f"buy_{news.hints.value.lower()}"
                bought += 1
            game.act(decision)
            observation, *_ = env.play(decision)
    assert bought > 10
    assert "agilerl" not in sys.modules


def test_a_policy_refuses_other_worlds_and_damage(tmp_path: Path) -> None:
    path = news_buyer(tmp_path / "policy")
    with pytest.raises(ModelError, match=r"plays 3 questions and 0 perps, but .* has 5 and 5"):
        numeric_decisions(path)([Game(make_scenario(0, HOUR))])
    (path / PROGRAM).write_bytes((path / PROGRAM).read_bytes()[:-1] + b"x")
    with pytest.raises(ModelError, match="is not the program of its"):
        numeric_decisions(path)
    manifest = path / MANIFEST
    manifest.write_text(manifest.read_text().replace('"balance"', '"wealth"'))
    with pytest.raises(ModelError, match="other features"):
        numeric_decisions(path)
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ModelError, match="has format 2, not 1"):
        numeric_decisions(path)


def test_any_number_of_seats_is_answered_at_once(tmp_path: Path) -> None:
    decide = numeric_decisions(exported(tmp_path / "policy", {(3, "balance"): 1.0}))
    games = [Game(make_scenario(n, STARTER)) for n in range(7)]
    assert decide([]) == []
    assert decide(games[:1]) + decide(games[1:]) == decide(games)
