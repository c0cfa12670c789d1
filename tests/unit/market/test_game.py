from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babylon.market.amm import Side
from babylon.market.arena import play, scripted
from babylon.market.game import Game
from babylon.market.orders import Hold, Order, OrderKind, parse_decision, render_decision
from babylon.market.prompts import render_observation
from babylon.market.scenario import NoiseOrder, Question, Rules, Scenario, make_scenario
from babylon.market.scripted import SCRIPTED_AGENTS


def quiet_scenario(outcome: Side = Side.YES, ticks: int = 2) -> Scenario:
    """One market, no fee, background orders of nothing."""
    drawn = make_scenario(0, Rules(markets=1, ticks=ticks, fee=0.0))
    return Scenario(
        "quiet",
        drawn.rules,
        (Question("m1", "Will it?", outcome),),
        tuple(drawn.news),
        tuple(NoiseOrder("m1", Side.YES, 0.0) for _ in range(ticks)),
    )


def test_a_right_bet_pays_a_dollar_a_share() -> None:
    game = Game(quiet_scenario(Side.YES))
    game.act(Order("m1", OrderKind.BUY_YES, 100))
    assert game.balance == 900
    assert game.settle() == pytest.approx(183.3333 - 100, abs=1e-3)


def test_a_wrong_bet_loses_the_stake() -> None:
    game = Game(quiet_scenario(Side.NO))
    game.act(Order("m1", OrderKind.BUY_YES, 100))
    assert game.settle() == pytest.approx(-100)


def test_fees_are_a_tenth_of_a_percent() -> None:
    scenario = quiet_scenario()
    scenario = Scenario(
        "fee", Rules(markets=1, ticks=2), scenario.questions, scenario.news, scenario.noise
    )
    game = Game(scenario)
    outcome = game.act(Order("m1", OrderKind.BUY_YES, 100))
    assert outcome.shares == pytest.approx(99.9 + 500 - 250_000 / 599.9)


def test_a_sale_realises_its_profit() -> None:
    game = Game(quiet_scenario())
    bought = game.act(Order("m1", OrderKind.BUY_YES, 100))
    sold = game.act(Order("m1", OrderKind.SELL, bought.shares / 2))
    half = game.pools["m1"]
    assert sold.success and sold.realised_pnl is not None
    assert sold.dollars == pytest.approx(game.balance - 900)
    assert sold.realised_pnl == pytest.approx(sold.dollars - 50)
    assert half.probability > 0.5


@pytest.mark.parametrize(
    ("decision", "complaint"),
    [
        (Order("m9", OrderKind.BUY_YES, 10), "'m9' does not exist"),
        (Order("m1", OrderKind.BUY_YES, 151), "above the largest order"),
        (Order("m1", OrderKind.SELL, 10), "no position"),
        (Hold(error="malformed reply: x"), "malformed"),
    ],
)
def test_a_refused_decision_costs_the_tick_and_nothing_else(
    decision: Order | Hold, complaint: str
) -> None:
    game = Game(quiet_scenario())
    outcome = game.act(decision)
    assert not outcome.success and complaint in (outcome.error or "")
    assert game.tick == 1 and game.balance == 1000 and not game.holdings


def test_more_than_the_balance_is_refused() -> None:
    game = Game(quiet_scenario(ticks=8))
    for _ in range(6):
        assert game.act(Order("m1", OrderKind.BUY_YES, 150)).success
    assert "above the balance" in (game.act(Order("m1", OrderKind.BUY_YES, 150)).error or "")


@given(st.integers(0, 10**6), st.sampled_from(sorted(SCRIPTED_AGENTS)))
def test_money_is_conserved(seed: int, name: str) -> None:
    """Dollars paid in by the agent and the background equal reserves' growth plus shares minted."""
    scenario = make_scenario(seed, Rules(fee=0.0))
    game, random = Game(scenario), Random(seed)
    paid_in = dict.fromkeys(game.pools, 0.0)
    minted = {market: {Side.YES: 500.0, Side.NO: 500.0} for market in game.pools}
    for order in scenario.noise:
        paid_in[order.market_id] += order.dollars
    while not game.over:
        outcome = game.act(SCRIPTED_AGENTS[name](game, random))
        if outcome.success and outcome.market_id:
            paid_in[outcome.market_id] += outcome.dollars
    background = {market: {Side.YES: 0.0, Side.NO: 0.0} for market in game.pools}
    for market, pool in game.pools.items():
        for side, reserve in ((Side.YES, pool.yes), (Side.NO, pool.no)):
            held = game.holdings.get((market, side))
            minted_side = minted[market][side] + paid_in[market]
            background[market][side] = minted_side - reserve - (held.shares if held else 0.0)
            assert background[market][side] >= -1e-6  # nobody holds shares that were never minted
    assert game.balance == pytest.approx(1000 - sum(h.cost for h in game.holdings.values()))


def test_a_seed_is_a_world() -> None:
    assert make_scenario(7) == make_scenario(7)
    assert make_scenario(7) != make_scenario(8)


def test_skill_is_graded_as_documented() -> None:
    worlds = [make_scenario(f"graded:{number}") for number in range(200)]
    mean = {
        name: fmean(play(scripted(agent), worlds).pnl) for name, agent in SCRIPTED_AGENTS.items()
    }
    assert mean["oracle"] > mean["news"] > mean["hold"] > mean["random"] > mean["contrarian"]


@given(st.text())
def test_any_reply_is_a_decision(reply: str) -> None:
    decision = parse_decision(reply)
    assert isinstance(decision, Order) or decision.error is not None


@pytest.mark.parametrize("kind", OrderKind)
def test_a_decision_survives_its_reply(kind: OrderKind) -> None:
    order = Order("m2", kind, 50)
    assert parse_decision(render_decision(order)) == order
    assert parse_decision(render_decision(Hold())) == Hold()


@pytest.mark.parametrize("amount", ["1e999", "-5", "0", "NaN"])
def test_an_amount_must_be_a_positive_number(amount: str) -> None:
    reply = (
        '{"action":"trade","trade":{"type":"prediction","market":"m1","action":"buy_yes",'
        f'"amount":{amount}}}}}'
    )
    assert parse_decision(reply) != Order("m1", OrderKind.BUY_YES, float(amount))
    assert isinstance(parse_decision(reply), Hold)


def test_the_observation_does_not_tell_the_outcome() -> None:
    """Two worlds that differ in their outcomes alone look the same to an agent."""
    scenario = make_scenario(3)
    flipped = Scenario(
        scenario.scenario_id,
        scenario.rules,
        tuple(Question(q.market_id, q.text, q.outcome.other) for q in scenario.questions),
        scenario.news,
        scenario.noise,
    )
    assert render_observation(Game(scenario), "a") == render_observation(Game(flipped), "a")


def test_agents_of_a_scenario_share_all_but_what_is_private() -> None:
    game = Game(make_scenario(3))
    one, other = (render_observation(game, name)[1]["content"] for name in ("agent-1", "agent-2"))
    assert one.rsplit("\n", 1)[0] == other.rsplit("\n", 1)[0]
    assert one != other
