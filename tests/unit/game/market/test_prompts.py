"""Prompts show agents their market, and never the ground truth."""

import re
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from babylon.game.market.amm import Side
from babylon.game.market.game import Game, make_market
from babylon.game.market.market import Seat
from babylon.game.market.orders import Comment, Hold, Order, OrderKind, Post, parse_decision
from babylon.game.market.prompts import render_observation, system_prompt
from babylon.game.market.scenario import HOUR, NpcPost, Question, Rules, Scenario, make_scenario
from babylon.game.market.scripted import SCRIPTED_AGENTS
from tests.worlds import perp, quiet_world


def user_prompt(game: Seat, name: str = "agent-1") -> str:
    return render_observation(game, name)[1]["content"]


def test_an_hour_is_shown_market_first_and_what_is_private_last() -> None:
    questions = (
        Question("m1", "Will it?", Side.YES, resolves_at=1),
        Question("m2", "And this?", Side.NO),
    )
    game = Game(
        quiet_world(
            *questions,
            ticks=4,
            fee=0.001,
            perps=[
                perp(200.0, 201.0, 210.0, 1.0, 1.0, rate=0.00012),
                perp(*[50.0] * 5, ticker="NVDT"),
            ],
            posts=[NpcPost(0, "moon_maxi", "m2: up only")],
            feed=True,
            start_minute=7 * 60 + 58,
        )
    )
    game.act(Order("OPNAI", OrderKind.OPEN_LONG, 500, 5))
    game.act(Order("m9", OrderKind.BUY_YES, 5))
    game.market.feed.posts[0].comment("agent-2", "source?")
    assert user_prompt(game) == (
        "Questions:\n"
        "m1 Will it? Traded until minute 1.\n"
        "m2 And this? Traded until minute 4.\n"
        "Perpetual futures:\n"
        "OPNAI OPNAI Inc., funding +0.012%\n"
        "NVDT NVDT Inc., funding +0.000%\n"
        "It is 08:00 UTC, minute 3 of 4, next funding at 16:00.\n"
        "OPNAI $210.00 (+5.0%)\n"
        "NVDT $50.00 (+0.0%)\n"
        "Top gainers: OPNAI +5.0%\n"
        "Feed:\n"
        "p1 moon_maxi: m2: up only\n"
        "  agent-2: source?\n"
        "Prices:\n"
        "m1 resolved YES\n"
        "m2 YES $0.50, NO $0.50, YES/NO shares 500/500\n"
        "You are agent-1. Strategy: bold: large stakes as soon as the evidence is clear.\n"
        "Balance $899.44, P&L $+24.44.\n"
        "Open positions:\n"
        "OPNAI long $500.00 from $200.00, leverage 5.0, liquidation at $164.00, P&L $+25.00\n"
        "Your last action failed: market 'm9' does not exist: choose one of m2"
    )


def test_agents_in_worlds_of_their_own_share_all_that_their_trades_do_not_move() -> None:
    trader, watcher = (Game(make_scenario(3, HOUR)) for _ in range(2))
    for _ in range(7):
        trader.act(Order("m1", OrderKind.BUY_YES, 50))
        watcher.act(Hold())
    (shared, _, own), (before, _, others) = (
        user_prompt(game).partition("\nPrices:\n") for game in (trader, watcher)
    )
    assert shared == before and own != others
    assert "Top losers: " in shared and "Earlier news:\n" in shared and "Feed:\n" in shared


def test_news_are_shown_as_they_come_the_last_five() -> None:
    game = Game(make_scenario(3, HOUR))
    for _ in range(7):
        game.act(Hold())
    told = re.findall(r"minute (\d+), (\w+): (.+)\.\n", user_prompt(game))
    expected = [
        (str(tick + 1), news.market_id, news.text)
        for tick, news in enumerate(game.scenario.news[:7])
        if news
    ]
    assert told == expected[-5:]
    now = game.scenario.news[7]
    assert now and f"{told[-1][2]}.\nNews on {now.market_id}: {now.text}.\n" in user_prompt(game)


def test_holdings_are_shown_with_what_was_paid_and_what_they_are_worth() -> None:
    game = Game(replace(make_scenario(3, HOUR), noise=(None,) * 60))
    game.act(Order("m1", OrderKind.BUY_NO, 100))
    assert "\nm1 NO 183.2 shares, paid $100.00, worth $99.90" in user_prompt(game)


RULES = [
    Rules(),
    HOUR,
    replace(HOUR, perps=0),
    replace(HOUR, feed=False),
    Rules(perps=1),
    Rules(feed=True),
    Rules(spread=True),
]
EXAMPLES = {
    "buy_yes": Order("m1", OrderKind.BUY_YES, 10),
    "open_long": Order("{ticker}", OrderKind.OPEN_LONG, 10, 2),
    "post": Post("hello"),
    "comment": Comment("p1", "hello"),
}


@pytest.mark.parametrize("rules", RULES)
def test_what_is_offered_is_what_can_be_done(rules: Rules) -> None:
    scenario = make_scenario(1, rules)
    system = render_observation(Game(scenario), "a")[0]["content"]
    ticker = scenario.perps[0].ticker if scenario.perps else "OPNAI"
    for word, example in EXAMPLES.items():
        if isinstance(example, Order):
            example = replace(example, market=example.market.format(ticker=ticker))
        assert (f'"{word}"' in system) is Game(scenario).act(example).success
    for word in ("perp", "leverage", "liquidated", "funding"):
        assert (word in system.lower()) is bool(rules.perps)
    assert ("feed" in system) is rules.feed


def test_every_reply_that_the_system_prompt_shows_is_understood() -> None:
    system = system_prompt(HOUR)
    offered = [line for line in system.splitlines() if line.startswith("{")]
    assert len(offered) == 5
    for line in offered:
        template = line.split(" - ")[0]
        for kind in re.findall(r'"((?:buy|sell|open|close)\w*)"', template) or [""]:
            reply = re.sub(r'"action":"\w+"( or "\w+")+', f'"action":"{kind}"', template)
            for name, value in (("ID", '"m1"'), ("TICKER", '"X"'), ("N", "10"), ("L", "2")):
                reply = re.sub(rf":{name}\b", f":{value}", reply)
            reply = re.sub(r":(TEXT|WHY)\b", ':"words"', reply)
            decision = parse_decision(reply)
            assert not (isinstance(decision, Hold) and decision.error), reply


def unseen(scenario: Scenario, tick: int) -> Scenario:
    """The same past until ``tick``, and all that an agent cannot know otherwise."""
    return replace(
        scenario,
        questions=tuple(
            q
            if q.resolves_at is not None and q.resolves_at <= tick
            else replace(q, outcome=q.outcome.other)
            for q in scenario.questions
        ),
        perps=tuple(
            replace(p, prices=(*p.prices[: tick + 1], *(9.0 for _ in p.prices[tick + 1 :])))
            for p in scenario.perps
        ),
        news=tuple(
            replace(n, hints=n.hints.other) if at <= tick else None
            for at, n in enumerate(scenario.news)
            if n
        ),
        noise=tuple(order if at <= tick else None for at, order in enumerate(scenario.noise)),
        posts=tuple(post for post in scenario.posts if post.tick <= tick),
    )


def plays(scenario: Scenario, replies: list[Order | Post], ticks: int) -> Iterator[str]:
    game = Game(scenario)
    for tick in range(ticks):
        yield user_prompt(game)
        game.act(replies[tick])


@pytest.mark.parametrize("rules", [Rules(), HOUR])
@pytest.mark.parametrize("seed", range(5))
def test_no_ground_truth_is_shown(rules: Rules, seed: int) -> None:
    """Two worlds that differ in outcomes, in prices to come and in the truth of the news alone look
    the same to an agent that does the same."""
    scenario, random = make_scenario(seed, rules), Random(seed)
    market = make_market(scenario)
    seat, decisions = market.join("a"), []
    tick = rules.ticks // 2
    for _ in range(tick + 1):
        decisions.append(SCRIPTED_AGENTS["news"](seat, random))
        market.step({"a": decisions[-1]})
    other = unseen(scenario, tick)
    assert other != scenario
    seen, also = (list(plays(world, decisions, tick + 1)) for world in (scenario, other))
    assert seen == also


def test_what_the_opponents_are_is_not_shown() -> None:
    names = ("oracle", "contrarian", "momentum", "maker")
    game = Game(make_scenario(2, replace(HOUR, opponents=names)))
    shown = ""
    while not game.over:
        shown += str(render_observation(game, "agent-1"))
        game.act(Hold())
    assert "trader-" in shown  # they write on the feed
    assert not any(name in shown for name in names)


@pytest.mark.parametrize(("rules", "private"), [(Rules(), 1), (HOUR, 4)])
def test_agents_of_a_scenario_share_all_but_what_is_private(rules: Rules, private: int) -> None:
    game = Game(make_scenario(3, rules))
    one, other = (user_prompt(game, name).splitlines() for name in ("agent-1", "agent-2"))
    assert one[:-private] == other[:-private]
    assert one != other
