"""Several players in one market: order, opponents, determinism, and that no money is lost."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from babylon.game.market.amm import Side
from babylon.game.market.game import Game, make_market
from babylon.game.market.market import Market, Seat
from babylon.game.market.orders import Comment, Decision, Hold, Order, OrderKind, Post
from babylon.game.market.scenario import HOUR, Question, make_scenario
from babylon.game.market.scripted import SCRIPTED_AGENTS
from tests.worlds import perp, quiet_world

WILD = replace(HOUR, ticks=20, volatility=0.02)  # so that positions are liquidated


def gamble(seat: Seat, random: Random) -> Decision:
    """Anything that can be decided, sensible or not."""
    markets = [q.market_id for q in seat.scenario.questions]
    tickers = [p.ticker for p in seat.scenario.perps]
    shares, perps = ("buy_yes", "buy_no", "sell"), ("open_long", "open_short", "close")
    amount = random.choice([5.0, 50.0, 150.0, 400.0])
    match random.randrange(6):
        case 0:
            return random.choice([Hold(), Hold("malformed reply: x"), Post("hm"), Post("")])
        case 1:
            return Comment(random.choice(["p1", "p999"]), "why?")
        case 2 | 3:
            return Order(random.choice(markets), OrderKind(random.choice(shares)), amount)
        case _:
            leverage = random.choice([1.0, 10.0, 100.0, 1000.0])
            kind = OrderKind(random.choice(perps))
            return Order(random.choice(tickers), kind, amount * random.choice([1, 20]), leverage)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 5), st.booleans())
def test_money_is_conserved(seed: int, players: int, crowd: bool) -> None:
    """Balances, margins, the exchange and the collateral always add up to what was brought, and
    whatever of a market's shares is neither in its pool nor held is the crowd's."""
    rules = WILD if crowd else replace(WILD, noise_order=0.0)
    market = Market(make_scenario(seed, rules, start_minute=8 * 60 - 10), [gamble])
    seats = {f"a{i}": market.join(f"a{i}") for i in range(players)}
    brought = 1000.0 * (players + 1)
    while not market.over:
        market.step({name: gamble(s, Random(f"{seed}{name}{s.tick}")) for name, s in seats.items()})
        assert market.total == pytest.approx(brought, abs=1e-6)
        assert all(account.balance > -1e-9 for account in market.accounts.values())
        for name, pool in market.predictions.pools.items():
            for side, reserve in ((Side.YES, pool.yes), (Side.NO, pool.no)):
                held = sum(
                    account.holdings[name, side].shares
                    for account in market.accounts.values()
                    if (name, side) in account.holdings
                )
                crowds = market.predictions.pairs[name] - reserve - held
                assert crowds >= -1e-6 if crowd else crowds == pytest.approx(0, abs=1e-6)
    market.settle()
    assert market.total == pytest.approx(brought, abs=1e-6)
    cash = sum(account.balance for account in market.accounts.values())
    assert cash + market.exchange.balance == pytest.approx(brought, abs=1e-6)


def test_the_wild_world_of_the_property_liquidates_funds_and_resolves() -> None:
    """The cases of the property above do occur in it."""
    market = make_market(make_scenario(1, WILD, start_minute=8 * 60 - 10))
    seat = market.join("a")
    while not market.over:
        market.step({"a": gamble(seat, Random(f"happens:{market.tick}"))})
    exits = [outcome.perp.exit for outcome in seat.outcomes if outcome.perp]
    assert any(exit.liquidated for exit in exits)
    assert market.predictions.resolved
    assert {outcome.action_type for outcome in seat.outcomes} >= {
        "BUY_SHARES",
        "OPEN_PERP_POSITION",
        "COMMENT",
    }


def test_a_seed_repeats_the_play_of_all() -> None:
    def played(seed: int) -> list[object]:
        market = make_market(make_scenario(seed, replace(HOUR, opponents=("random", "momentum"))))
        seats = {name: market.join(name) for name in ("a", "b", "c")}
        while not market.over:
            market.step({n: gamble(s, Random(f"{n}{s.tick}")) for n, s in seats.items()})
        market.settle()
        return [(a.name, a.balance, a.outcomes) for a in market.accounts.values()]

    assert played(1) == played(1)
    assert played(1) != played(2)


def test_orders_of_a_tick_are_carried_out_one_after_the_other_in_an_order_that_changes() -> None:
    """The first buyer gets more shares; all had seen the same price."""
    market = make_market(quiet_world(ticks=40))
    for name in ("a", "b"):
        market.join(name)
    firsts = set()
    while not market.over:
        price = market.predictions.pools["m1"].probability
        outcomes = market.step(dict.fromkeys(("a", "b"), Order("m1", OrderKind.BUY_YES, 10)))
        shares = {name: outcome.shares for name, outcome in outcomes.items()}
        assert [*outcomes] == ["a", "b"] and shares["a"] != shares["b"]
        assert 10 / max(shares.values()) > price
        firsts.add(max(shares, key=lambda name: shares[name]))
        for name in ("a", "b"):  # so that neither runs out of money
            market.accounts[name].balance = 1000.0
    assert firsts == {"a", "b"}


def test_the_order_is_the_seeds_however_the_decisions_are_listed() -> None:
    def shares(names: list[str]) -> list[float]:
        market = make_market(quiet_world())
        for name in ("a", "b", "c"):
            market.join(name)
        outcomes = market.step(dict.fromkeys(names, Order("m1", OrderKind.BUY_YES, 10)))
        return [outcomes[name].shares for name in ("a", "b", "c")]

    assert shares(["a", "b", "c"]) == shares(["c", "a", "b"])


def test_who_has_no_account_cannot_decide() -> None:
    market = make_market(quiet_world())
    with pytest.raises(ValueError, match=r"\['ghost'\] have no account"):
        market.step({"ghost": Hold()})
    assert market.tick == 0


def test_who_decides_nothing_does_nothing() -> None:
    market = make_market(quiet_world())
    for name in ("a", "b"):
        market.join(name)
    assert [*market.step({"b": Hold()})] == ["b"]
    assert market.tick == 1 and market.accounts["a"].outcomes == []


def test_opponents_trade_before_the_player_in_the_same_market() -> None:
    """The oracle buys $150 of YES first, at 500/500: the player then gets fewer than 183.33."""
    alone, met = (
        Game(quiet_world(opponents=names)).act(Order("m1", OrderKind.BUY_YES, 100)).shares
        for names in ((), ("oracle",))
    )
    assert alone == pytest.approx(183.3333, abs=1e-3)
    assert met == pytest.approx(100 + 250_000 / 650 - 250_000 / 750)


def test_opponents_play_by_their_scenario_not_by_the_player() -> None:
    def balances(decision: Decision) -> dict[str, float]:
        game = Game(quiet_world(Question("m1", "?", Side.NO), opponents=("oracle",)))
        game.act(decision)
        return {name: account.balance for name, account in game.market.accounts.items()}

    assert balances(Hold())["trader-1"] == balances(Hold("malformed"))["trader-1"] == 850


def test_an_unknown_opponent_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"opponents sage are unknown: choose from random, news"):
        make_market(quiet_world(opponents=("sage", "news")))


def test_a_name_is_taken_once() -> None:
    market = make_market(quiet_world(opponents=("random",)))
    with pytest.raises(ValueError, match="'trader-1' already has an account"):
        market.join("trader-1")


def test_play_ends_with_its_last_tick() -> None:
    game = Game(quiet_world(ticks=1))
    game.act(Hold())
    assert game.over
    with pytest.raises(ValueError, match="all 1 ticks of quiet are played"):
        game.act(Hold())


def test_the_game_of_one_is_a_market_of_one() -> None:
    scenario = make_scenario(5, HOUR)
    game, market = Game(scenario), make_market(scenario)
    seat = market.join("player")
    while not game.over:
        decision = SCRIPTED_AGENTS["news"](game, Random(game.tick))
        game.act(decision)
        market.step({"player": decision})
        assert seat.equity == game.equity
    market.settle()
    assert seat.pnl == game.settle() != 0


def test_markets_of_one_scenario_have_nothing_in_common() -> None:
    scenario = quiet_world(feed=True, perps=[perp(1.0, 1.0, 1.0, 1.0, 1.0)])
    first, second = make_market(scenario), make_market(scenario)
    first.join("a")
    first.step({"a": Post("hello")})
    assert first.feed.posts and not second.feed.posts
    assert "a" not in second.accounts
