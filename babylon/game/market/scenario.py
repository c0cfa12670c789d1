"""Scenarios: questions with outcomes, perps with prices, news, posts and the crowd's orders.

A scenario follows from one seed, so that two policies can be compared on the same world (common
random numbers). Outcomes and future prices are ground truth. Agents see the questions, the current
prices, the news and the feed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from random import Random
from typing import NamedTuple

from babylon.game.market.amm import Side
from babylon.game.market.words import AUTHORS, COMPANIES, EVENTS, NEWS, PERP_NEWS, RUMOURS, TICKERS

DAY_MINUTES = 24 * 60
MAX_TEXT = 40  # bytes; no made question, headline, post or name is longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Size and difficulty of a scenario.

    Money is in dollars. A tick is one minute, in which every agent decides once. The defaults are
    the small game of the demo.
    """

    markets: int = 3
    ticks: int = 6
    start_balance: float = 1000.0
    max_order: float = 150.0  # largest amount that one order takes from the balance
    fee: float = 0.001  # share of the dollars traded, or of a perp's size
    news_reliability: float = 0.95  # P(news agrees with the outcome, or with a perp's trend)
    noise_order: float = 60.0  # largest background order; one per tick
    perps: int = 0
    trend: float = 0.0005  # drift of a perp's log price per tick, up or down
    volatility: float = 0.002  # standard deviation of a perp's log price per tick
    spread: bool = False  # True: questions resolve one after the other; False: all at the end
    feed: bool = False
    post_reliability: float = 0.6  # as news_reliability, for posts of non-players
    opponents: tuple[str, ...] = ()  # scripted agents that trade in the same market


STARTER = Rules()
HOUR = Rules(markets=5, ticks=60, news_reliability=0.75, perps=5, spread=True, feed=True)
PRESETS = {"starter": STARTER, "hour": HOUR}


@dataclass(frozen=True, slots=True)
class Question:
    """A prediction market. ``outcome`` is ground truth."""

    market_id: str
    text: str
    outcome: Side
    resolves_at: int | None = None  # first tick in which trading is closed; None: the end

    def end(self, rules: Rules) -> int:
        return rules.ticks if self.resolves_at is None else self.resolves_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Perp:
    """A perpetual future. Prices after the current tick are ground truth."""

    ticker: str
    name: str
    prices: tuple[float, ...]  # [ticks + 1] dollars, in every tick and at the end
    funding_rate: float = 0.0  # share of the size that longs pay to shorts at 00, 08 and 16 h


@dataclass(frozen=True, slots=True)
class News:
    """A headline about one market or ticker, published before agents act in a tick."""

    market_id: str
    text: str
    hints: Side  # the outcome that the words suggest (perps: YES is up); may be wrong


@dataclass(frozen=True, slots=True)
class NpcPost:
    """A post of a non-player at the beginning of a tick."""

    tick: int
    author: str
    text: str


@dataclass(frozen=True, slots=True)
class NoiseOrder:
    """A background order, carried out before agents act in a tick."""

    market_id: str
    side: Side
    dollars: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """A seeded world.

    ``news`` and ``noise`` have one entry per tick; None: nothing happens. ``start_minute`` is the
    minute of the UTC day at tick 0.
    """

    scenario_id: str
    rules: Rules
    questions: tuple[Question, ...]
    news: tuple[News | None, ...]
    noise: tuple[NoiseOrder | None, ...]
    perps: tuple[Perp, ...] = ()
    posts: tuple[NpcPost, ...] = ()
    start_minute: int = 0

    def question(self, market_id: str) -> Question | None:
        return next((q for q in self.questions if q.market_id == market_id), None)


class _Topic(NamedTuple):
    """A question or perp that news and posts are about until it stops trading."""

    market_id: str
    truth: Side
    until: int
    words: Mapping[Side, Sequence[str]]


def make_scenario(
    seed: int | str, rules: Rules | None = None, *, name: str = "", start_minute: int | None = None
) -> Scenario:
    """Make the world of a seed.

    Args:
        name: The scenario id; ``scenario-<seed>`` by default.
        start_minute: Minute of the UTC day at tick 0. Drawn from the seed by default if there are
            perps (funding depends on it), else 0.

    Raises:
        ValueError: The rules ask for more markets or perps than there are names, for no market, or
            for no tick.
    """
    rules = rules or STARTER
    if min(rules.markets, rules.ticks) < 1:
        raise ValueError(
            f"{rules.markets} markets and {rules.ticks} ticks: at least one of each is needed"
        )
    if max(rules.markets, rules.perps) > len(COMPANIES):
        raise ValueError(
            f"{rules.markets} markets and {rules.perps} perps: at most {len(COMPANIES)} of each"
            " are possible"
        )
    # Perps, clock and feed have streams of their own: they change no question of the same seed.
    random = Random(f"scenario:{seed}")
    questions = _questions(random, rules)
    perps, trends = _perps(Random(f"perps:{seed}"), rules)
    topics = [_Topic(q.market_id, q.outcome, q.end(rules), NEWS) for q in questions]
    traded = [
        _Topic(p.ticker, t, rules.ticks, PERP_NEWS) for p, t in zip(perps, trends, strict=True)
    ]
    if start_minute is None:
        start_minute = Random(f"clock:{seed}").randrange(DAY_MINUTES) if perps else 0
    return Scenario(
        scenario_id=name or f"scenario-{seed}",
        rules=rules,
        questions=questions,
        news=tuple(
            _news(random, topic, rules) for topic in _schedule(random, topics + traded, rules)
        ),
        noise=tuple(
            NoiseOrder(
                random.choice(_open(topics, tick)).market_id,
                random.choice([*Side]),
                random.uniform(0.0, rules.noise_order),
            )
            for tick in range(rules.ticks)
        ),
        perps=perps,
        posts=_posts(Random(f"feed:{seed}"), topics + traded, rules) if rules.feed else (),
        start_minute=start_minute,
    )


def _questions(random: Random, rules: Rules) -> tuple[Question, ...]:
    companies = random.sample(COMPANIES, rules.markets)
    return tuple(
        Question(
            f"m{index + 1}",
            f"Will {company} {random.choice(EVENTS)}?",
            random.choice([*Side]),
            max(1, rules.ticks * (index + 1) // rules.markets) if rules.spread else None,
        )
        for index, company in enumerate(companies)
    )


def _perps(random: Random, rules: Rules) -> tuple[tuple[Perp, ...], list[Side]]:
    """Draw the perps with their geometric random walks → (perps, direction of each drift)."""
    listed = random.sample([*zip(TICKERS, COMPANIES, strict=True)], rules.perps)
    trends = [random.choice([*Side]) for _ in listed]
    perps = tuple(
        Perp(
            ticker=ticker,
            name=name,
            prices=_walk(random, rules, rules.trend if trend is Side.YES else -rules.trend),
            funding_rate=round(random.uniform(-5e-4, 5e-4), 5),
        )
        for (ticker, name), trend in zip(listed, trends, strict=True)
    )
    return perps, trends


def _walk(random: Random, rules: Rules, drift: float) -> tuple[float, ...]:
    """Draw a price path in whole cents, so that agents trade at the prices they read."""
    price = random.uniform(50.0, 500.0)
    prices = [price]
    for _ in range(rules.ticks):
        price *= exp(drift + random.gauss(0.0, rules.volatility))
        prices.append(price)
    return tuple(round(price, 2) for price in prices)


def _open(topics: list[_Topic], tick: int) -> list[_Topic]:
    return [topic for topic in topics if tick < topic.until]


def _schedule(random: Random, topics: list[_Topic], rules: Rules) -> list[_Topic]:
    """Draw the topic of each tick's news.

    All topics come equally often, in random order. A topic that no longer trades is replaced by an
    open one.
    """
    repeated = [topics[tick % len(topics)] for tick in range(rules.ticks)]
    random.shuffle(repeated)
    return [
        topic if tick < topic.until else random.choice(_open(topics, tick))
        for tick, topic in enumerate(repeated)
    ]


def _news(random: Random, topic: _Topic, rules: Rules) -> News:
    truthful = random.random() < rules.news_reliability
    hints = topic.truth if truthful else topic.truth.other
    return News(topic.market_id, random.choice(topic.words[hints]), hints)


def _posts(random: Random, topics: list[_Topic], rules: Rules) -> tuple[NpcPost, ...]:
    posts = []
    for tick in range(0, rules.ticks, 2):
        topic = random.choice(_open(topics, tick))
        truthful = random.random() < rules.post_reliability
        words = random.choice(RUMOURS[topic.truth if truthful else topic.truth.other])
        posts.append(NpcPost(tick, random.choice(AUTHORS), f"{topic.market_id}: {words}"))
    return tuple(posts)
