"""The ladder of skill: mean P&L over the same worlds, ordered as documented."""

import itertools
from dataclasses import replace
from random import Random
from statistics import fmean

import pytest

from babylon.game.market.game import Game
from babylon.game.market.orders import parse_decision, render_decision
from babylon.game.market.perps import Direction
from babylon.game.market.scenario import HOUR, Rules, make_scenario
from babylon.game.market.scripted import RULES, SCRIPTED_AGENTS
from tests.worlds import perp, quiet_world

# From highest to lowest mean P&L, in the small game and in the full hour. The crowd trades at
# random: trading against it pays a little, and following it loses.
LADDER = [
    {"oracle"},
    {"news", "counter", "mover"},
    {"maker"},
    {"hold"},
    {"random", "momentum"},
    {"contrarian"},
]


def play(name: str, world: int, rules: Rules) -> Game:
    game = Game(make_scenario(f"graded:{world}", rules))
    random = Random(f"{name}:{world}")
    while not game.over:
        game.act((RULES | SCRIPTED_AGENTS)[name](game, random))
    game.settle()
    return game


def mean_pnl(rules: Rules, worlds: int) -> dict[str, float]:
    return {
        name: fmean(play(name, world, rules).pnl for world in range(worlds))
        for name in SCRIPTED_AGENTS
    }


@pytest.mark.parametrize(("rules", "worlds"), [(Rules(), 200), (HOUR, 50)])
def test_skill_is_graded_as_documented(rules: Rules, worlds: int) -> None:
    mean = mean_pnl(rules, worlds)
    for above, below in itertools.pairwise(LADDER):
        assert min(mean[name] for name in above) > max(mean[name] for name in below)
    assert mean["hold"] == 0


@pytest.mark.parametrize(
    ("rules", "best"),
    [(Rules(), "bold"), (Rules(news_reliability=0.05), "doubter"), (HOUR, "trend")],
)
def test_the_best_rule_is_the_documented_one(rules: Rules, best: str) -> None:
    mean = {name: fmean(play(name, world, rules).pnl for world in range(50)) for name in RULES}
    assert max(mean, key=lambda name: mean[name]) == best


@pytest.mark.parametrize("name", sorted({*SCRIPTED_AGENTS} - {"hold"}))
def test_every_script_plays_questions_and_perps_and_is_never_refused(name: str) -> None:
    games = [play(name, world, HOUR) for world in range(5)]
    outcomes = [outcome for game in games for outcome in game.outcomes]
    assert [outcome.error for outcome in outcomes if not outcome.success] == []
    actions = {outcome.action_type for outcome in outcomes}
    assert "OPEN_PERP_POSITION" in actions
    assert ("BUY_SHARES" in actions) is (name not in ("oracle", "mover"))  # they prefer leverage
    assert (actions >= {"CREATE_POST", "COMMENT"}) is (name != "oracle")


@pytest.mark.parametrize("name", sorted(SCRIPTED_AGENTS))
def test_scripts_play_on_where_nothing_is_told_or_listed(name: str) -> None:
    """A replayed hour may have no news, and no open question left."""
    rising = [perp(*[100.0 + tick for tick in range(5)])]
    for scenario in (quiet_world(), quiet_world(perps=rising), quiet_world(feed=True)):
        game = Game(scenario)
        while not game.over:
            game.act(SCRIPTED_AGENTS[name](game, Random(1)))
        assert all(outcome.success for outcome in game.outcomes)
    game = Game(replace(quiet_world(perps=rising), questions=()))
    while not game.over:
        game.act(SCRIPTED_AGENTS[name](game, Random(1)))
    assert all(outcome.success for outcome in game.outcomes)


def test_the_oracle_takes_the_most_leverage_that_survives() -> None:
    """From 100 the price falls to 99 before it ends at 110: 0.9 / 90 = 1 % of setback."""
    game = Game(quiet_world(fee=0.001, perps=[perp(100.0, 99.0, 105.0, 104.0, 110.0)]))
    game.act(SCRIPTED_AGENTS["oracle"](game, Random(0)))
    position = game.positions["OPNAI", Direction.LONG]
    assert position.leverage == pytest.approx(89)
    while not game.over:
        game.act(SCRIPTED_AGENTS["hold"](game, Random(0)))
    assert game.settle() > 1000


def test_the_market_maker_sells_all_of_a_holding_in_words_too() -> None:
    """A reply has six digits: what they leave out would be sold for the rest of the game."""
    for seed in range(20):
        game = Game(make_scenario(f"dust:{seed}", HOUR))
        while not game.over:
            reply = render_decision(SCRIPTED_AGENTS["maker"](game, Random(f"{seed}:{game.tick}")))
            outcome = game.act(parse_decision(reply))
            if outcome.action_type == "SELL_SHARES":
                assert (outcome.market_id, outcome.side) not in game.holdings
