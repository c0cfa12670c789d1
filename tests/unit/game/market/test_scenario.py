import math
from statistics import fmean, stdev

import pytest

from babylon.game.market.amm import Side
from babylon.game.market.scenario import (
    HOUR,
    MAX_TEXT,
    STARTER,
    Rules,
    Scenario,
    make_scenario,
)
from babylon.game.market.words import AUTHORS, COMPANIES, EVENTS, NEWS, PERP_NEWS, RUMOURS, TICKERS

WORLDS = [make_scenario(f"worlds:{number}", HOUR) for number in range(120)]


def test_a_seed_is_a_world() -> None:
    for rules in (STARTER, HOUR):
        assert make_scenario(7, rules) == make_scenario(7, rules)
        assert make_scenario(7, rules) != make_scenario(8, rules)


def test_no_text_is_longer_than_those_that_a_recorded_world_may_have() -> None:
    texts = [f"Will {company} {event}?" for company in COMPANIES for event in EVENTS]
    texts += [text for words in (NEWS, PERP_NEWS) for side in words.values() for text in side]
    texts += [f"{name}: {text}" for name in TICKERS for side in RUMOURS.values() for text in side]
    assert max(len(text.encode()) for text in (*texts, *AUTHORS)) <= MAX_TEXT


def test_an_hour_has_what_its_rules_say() -> None:
    world = WORLDS[0]
    assert [q.market_id for q in world.questions] == ["m1", "m2", "m3", "m4", "m5"]
    assert [q.resolves_at for q in world.questions] == [12, 24, 36, 48, 60]
    assert len({p.ticker for p in world.perps}) == 5
    assert all(len(p.prices) == 61 and min(p.prices) > 0 for p in world.perps)
    assert len(world.news) == len(world.noise) == 60
    assert len(world.posts) == 30
    assert 0 <= world.start_minute < 24 * 60


def test_nothing_is_told_or_traded_of_what_is_over() -> None:
    for world in WORLDS[:20]:
        ends = {q.market_id: q.resolves_at for q in world.questions}
        told = [(tick, news.market_id) for tick, news in enumerate(world.news) if news]
        told += [(post.tick, post.text.split(":")[0]) for post in world.posts]
        told += [(tick, order.market_id) for tick, order in enumerate(world.noise) if order]
        assert all(tick < (ends.get(market) or 60) for tick, market in told)


def _right(world: Scenario) -> list[bool]:
    """Of each headline whether it hints what happens; of a perp, whether it rises."""
    truth = {q.market_id: q.outcome for q in world.questions}
    return [truth[n.market_id] is n.hints for n in world.news if n and n.market_id in truth]


def test_headlines_are_as_reliable_as_the_rules_say() -> None:
    right = [verdict for world in WORLDS for verdict in _right(world)]
    assert fmean(right) == pytest.approx(0.75, abs=0.03)


def test_prices_walk_as_the_rules_say() -> None:
    """Log steps of standard deviation 0.002 around a trend of 0.0005 up or down."""
    perps = [perp for world in WORLDS for perp in world.perps]
    steps = [[math.log(b / a) for a, b in zip(p.prices, p.prices[1:], strict=False)] for p in perps]
    assert stdev(step for walk in steps for step in walk) == pytest.approx(0.00206, abs=1e-4)
    rises = [fmean(walk) for walk in steps]
    assert fmean(rise > 0 for rise in rises) == pytest.approx(0.5, abs=0.1)
    assert fmean(map(abs, rises)) == pytest.approx(0.0005, abs=5e-5)


def test_headlines_about_a_perp_hint_its_trend() -> None:
    agree = [
        (news.hints is Side.YES) is (perp.prices[-1] > perp.prices[0])
        for world in WORLDS
        for news in world.news
        for perp in world.perps
        if news and news.market_id == perp.ticker
    ]
    assert fmean(agree) > 0.7


def test_a_name_and_a_clock_can_be_given() -> None:
    world = make_scenario(1, HOUR, name="mine", start_minute=475)
    assert (world.scenario_id, world.start_minute) == ("mine", 475)
    assert make_scenario(1, HOUR).scenario_id == "scenario-1"


def test_questions_of_a_short_game_are_open_at_its_beginning() -> None:
    world = make_scenario(1, Rules(markets=5, ticks=3, spread=True))
    assert [q.resolves_at for q in world.questions] == [1, 1, 1, 2, 3]


@pytest.mark.parametrize("rules", [Rules(markets=9), Rules(perps=9)])
def test_more_than_there_are_names_for_is_an_error(rules: Rules) -> None:
    with pytest.raises(ValueError, match="at most 8 of each"):
        make_scenario(1, rules)


@pytest.mark.parametrize("rules", [Rules(markets=0, perps=2), Rules(ticks=0)])
def test_a_world_needs_a_market_and_a_tick(rules: Rules) -> None:
    with pytest.raises(ValueError, match="at least one of each is needed"):
        make_scenario(1, rules)
