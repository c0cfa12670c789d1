"""The vectorised core against the scalar game, which is the reference."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from babylon.game.envs.actions import to_decision
from babylon.game.envs.ledger import Ledger, ledger_of
from babylon.game.envs.observation import observe
from babylon.game.envs.vector_core import HOLD, KINDS, Core, Orders
from babylon.game.envs.worlds import from_scenarios
from babylon.game.market.amm import Side
from babylon.game.market.game import make_market
from babylon.game.market.market import Market
from babylon.game.market.orders import OrderKind
from babylon.game.market.scenario import HOUR, STARTER, Question, Rules, Scenario, make_scenario
from tests.worlds import perp, quiet_world

WILD = replace(HOUR, ticks=20, volatility=0.02, markets=3, perps=2)
TOLERANCE = 1e-9


def orders_of_everybody(random: np.random.Generator, core: Core) -> Orders:
    """Anything that can be ordered, sensible or not, down to the last cent of a balance."""
    shape = core.ledger.balance.shape
    kind = random.choice([HOLD, *KINDS.values()], shape)
    on_perps = kind >= KINDS[OrderKind.OPEN_LONG]
    questions, perps = core.worlds.questions, max(1, core.worlds.perps)
    if not core.worlds.perps:
        kind[on_perps] = HOLD
    amount = random.choice([0.0, 50.0, 150.0, 150.1, 2000.0, 4000.0], shape)
    exact = random.random(shape) < 0.1
    return Orders(
        kind,
        random.integers(np.where(on_perps, perps, questions)),
        np.where(exact, core.ledger.balance, amount * random.random(shape)),
        random.choice([0.5, 1.0, 20.0, 50.0, 100.0, 101.0], shape),
    )


def assert_same_state(core: Core, row: int, market: Market, names: list[str]) -> None:
    scalar = ledger_of(market, names)
    for field in fields(Ledger):
        if field.name == "world":
            continue
        ours, theirs = getattr(core.ledger, field.name)[row], getattr(scalar, field.name)[0]
        if field.name == "reserves":  # a resolved question has no pool in the scalar game
            ours, theirs = ours[scalar.open[0]], theirs[scalar.open[0]]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE, err_msg=field.name)
    np.testing.assert_allclose(core.ledger.total[row], market.total, rtol=0, atol=1e-6)


def play_both(scenarios: list[Scenario], traders: int, seed: int) -> list[Market]:
    """Play the scenarios in both games with the same decisions, comparing everything at every tick:
    state, equity, rewards, refusals and observations."""
    random = np.random.default_rng(seed)
    names = [f"t{number}" for number in range(traders)]
    core = Core(from_scenarios(scenarios, traders), len(scenarios))
    core.start(core.rows, core.rows)
    markets = [make_market(scenario) for scenario in scenarios]
    seats = [[market.join(name) for name in names] for market in markets]
    alone = [from_scenarios([scenario], traders) for scenario in scenarios]
    for row, market in enumerate(markets):
        assert_same_state(core, row, market, names)
    while not core.over.any():
        orders = orders_of_everybody(random, core)
        rewards, done = core.step(orders)
        observations = observe(core.ledger, core.worlds, core.equity)
        for row, market in enumerate(markets):
            mine = Orders(*(getattr(orders, f.name)[row : row + 1] for f in fields(Orders)))
            before = np.array([seat.equity for seat in seats[row]])
            outcomes = market.step(
                {n: to_decision(mine, t, market.scenario) for t, n in enumerate(names)}
            )
            if market.over:
                market.settle()
            equity = np.array([[seat.equity for seat in seats[row]]])
            assert_same_state(core, row, market, names)
            np.testing.assert_allclose(core.equity[row], equity[0], rtol=0, atol=TOLERANCE)
            np.testing.assert_allclose(rewards[row], equity[0] - before, rtol=0, atol=TOLERANCE)
            assert [*done[row]] == [outcomes[name].success for name in names]
            seen = observe(ledger_of(market, names), alone[row], equity)
            np.testing.assert_allclose(observations[row], seen[0], rtol=1e-6, atol=1e-6)
    return markets


def extreme(scenario: Scenario) -> Scenario:
    """Funding costs more than some can pay."""
    return replace(
        scenario, perps=tuple(replace(perp, funding_rate=5.0) for perp in scenario.perps)
    )


@settings(max_examples=25)
@given(
    st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3), st.sampled_from([WILD, STARTER])
)
def test_the_core_equals_the_scalar_game(seed: int, rows: int, traders: int, rules: Rules) -> None:
    scenarios = [
        make_scenario(seed + row, rules, start_minute=8 * 60 - 4 - row) for row in range(rows)
    ]
    if seed % 2:
        scenarios[0] = extreme(scenarios[0])
    play_both(scenarios, traders, seed)


def test_an_hour_of_many_in_one_market_is_the_same_in_both_games() -> None:
    markets = play_both([make_scenario(seed, HOUR) for seed in range(2)], traders=20, seed=0)
    assert all(market.over for market in markets)


def test_the_wild_worlds_of_the_comparison_have_everything_in_them() -> None:
    """Liquidations, funding, resolutions, and every order, carried out and refused."""
    scenario = make_scenario(3, WILD, start_minute=8 * 60 - 5)
    (market,) = play_both([scenario], traders=3, seed=3)
    outcomes = [outcome for account in market.accounts.values() for outcome in account.outcomes]
    assert any(outcome.perp and outcome.perp.exit.liquidated for outcome in outcomes)
    assert len(market.predictions.resolved) == WILD.markets
    trades = {"BUY_SHARES", "SELL_SHARES", "OPEN_PERP_POSITION", "CLOSE_PERP_POSITION"}
    assert trades <= {outcome.action_type for outcome in outcomes if outcome.success}
    assert trades <= {outcome.action_type for outcome in outcomes if not outcome.success}


@pytest.mark.parametrize(("rate", "paid"), [(0.01, 1.0), (-0.01, -1.0), (20.0, 900.0)])
def test_funding_is_paid_when_due_as_far_as_the_balance_goes(rate: float, paid: float) -> None:
    """Long $100 over 08:00, with $900 left."""
    prices = perp(10.0, 10.0, 10.0, rate=rate)
    scenario = quiet_world(perps=[prices], ticks=2, start_minute=8 * 60 - 1)
    core = Core(from_scenarios([scenario]), 1)
    core.start(core.rows, core.rows)
    rewards, _ = core.step(one_order(OrderKind.OPEN_LONG, 0, 100.0))
    assert rewards == pytest.approx(np.array([[-paid]]))
    assert core.ledger.total == pytest.approx(1000.0)


def one_order(kind: OrderKind, target: int, amount: float, leverage: float = 1.0) -> Orders:
    return Orders(
        np.array([[KINDS[kind]]]),
        np.array([[target]]),
        np.array([[amount]]),
        np.array([[leverage]]),
    )


def test_a_position_is_liquidated_at_the_cent_that_rounding_misses() -> None:
    """The limit of a short of ten times its margin from $50 is $54.50000000000001."""
    scenario = quiet_world(perps=[perp(50.0, 54.5, 50.0)], ticks=2)
    core, market = Core(from_scenarios([scenario]), 1), make_market(scenario)
    core.start(core.rows, core.rows)
    market.join("t")
    order = one_order(OrderKind.OPEN_SHORT, 0, 100.0, 10.0)
    core.step(order)
    market.step({"t": to_decision(order, 0, scenario)})
    assert not market.accounts["t"].positions
    assert_same_state(core, 0, market, ["t"])


def test_rows_may_be_at_different_ticks() -> None:
    """The second row is started anew in the middle of a play; the first does not notice."""
    random = np.random.default_rng(0)
    worlds = from_scenarios([make_scenario(seed, WILD) for seed in range(2)])
    core, undisturbed = Core(worlds, 2), Core(worlds, 2)
    for each in (core, undisturbed):
        each.start(each.rows, each.rows)
    for tick in range(WILD.ticks):
        orders = orders_of_everybody(random, undisturbed)
        undisturbed.step(orders)
        core.step(orders)
        if tick == 7:
            core.start(np.array([1]), np.array([0]))
            assert core.equity[1] == 1000 and core.ledger.tick[1] == 0
    assert [*core.over] == [True, False]
    assert core.equity[0] == undisturbed.equity[0] != 1000
    with pytest.raises(ValueError, match=r"rows \[0\] are over: start them again"):
        core.step(orders)


def test_worlds_of_a_core_are_alike_and_without_opponents() -> None:
    with pytest.raises(ValueError, match="differ in rules or size"):
        from_scenarios([make_scenario(0, HOUR), make_scenario(0, STARTER)])
    with pytest.raises(ValueError, match="no scenarios: give at least one"):
        from_scenarios([])
    with pytest.raises(ValueError, match=r"opponents \(news\) play only in the scalar game"):
        Core(from_scenarios([quiet_world(opponents=("news",))]), 1)


def test_a_world_of_perps_alone_is_played() -> None:
    scenario = replace(quiet_world(perps=[perp(10.0, 11.0, 11.0)], ticks=2), questions=())
    core = Core(from_scenarios([scenario]), 1)
    core.start(core.rows, core.rows)
    core.step(one_order(OrderKind.OPEN_LONG, 0, 100.0))
    assert core.equity == pytest.approx(1010.0)
    assert core.ledger.total == pytest.approx(1000.0)


def test_what_wins_pays_a_dollar_a_share_when_its_question_resolves() -> None:
    early = Question("m1", "Will it?", Side.NO, resolves_at=1)
    core = Core(from_scenarios([quiet_world(early, ticks=3)]), 1)
    core.start(core.rows, core.rows)
    core.step(one_order(OrderKind.BUY_NO, 0, 100.0))
    assert core.equity == pytest.approx(1000 - 100 + 183.3333, abs=1e-3)
    _, done = core.step(one_order(OrderKind.BUY_NO, 0, 100.0))
    assert not done.any()  # it is closed
