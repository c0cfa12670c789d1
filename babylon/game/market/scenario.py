"""What a scenario *is*: questions and how they resolve, perps and their prices, news, posts, crowd.

All of it follows from one seed, so that two policies can be compared on the same world (common
random numbers). Outcomes and the prices to come are ground truth: agents see the questions, the
present prices, the news and the feed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from random import Random
from typing import NamedTuple

from babylon.game.market.amm import Side
from babylon.game.market.words import AUTHORS, COMPANIES, EVENTS, NEWS, PERP_NEWS, RUMOURS, TICKERS

DAY_MINUTES = 24 * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Size and difficulty of a scenario. Dollars, and ticks of play in which agents may act; a
    tick is a minute. The defaults are the small game that the demo plays."""

    markets: int = 3
    ticks: int = 6
    start_balance: float = 1000.0
    max_order: float = 150.0  # the most that one order may take from the balance
    fee: float = 0.001  # of the dollars in or out; of a perp's size
    news_reliability: float = 0.95  # P(news agrees with the outcome, or with a perp's trend)
    noise_order: float = 60.0  # largest background order, one a tick
    perps: int = 0
    trend: float = 0.0005  # by which a perp's price drifts up or down, a tick
    volatility: float = 0.002  # standard deviation of a perp's log price, a tick
    spread: bool = False  # questions resolve one after the other, else all at the end
    feed: bool = False
    post_reliability: float = 0.6  # as news_reliability, of what strangers post
    opponents: tuple[str, ...] = ()  # scripted agents that trade in the same market


STARTER = Rules()
HOUR = Rules(markets=5, ticks=60, news_reliability=0.75, perps=5, spread=True, feed=True)
PRESETS = {"starter": STARTER, "hour": HOUR}


@dataclass(frozen=True, slots=True)
class Question:
    """One prediction market. ``outcome`` is ground truth."""

    market_id: str
    text: str
    outcome: Side
    resolves_at: int | None = None  # the tick from which it cannot be traded; None: at the end
    probabilities: tuple[float, ...] = ()  # P(YES) to which the crowd moves the price in each tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Perp:
    """One perpetual future. The prices after the present tick are ground truth."""

    ticker: str
    name: str
    prices: tuple[float, ...]  # dollars, in every tick and at the end: ``ticks + 1`` of them
    funding_rate: float = 0.0  # share of the size that longs pay, and shorts receive, at 00/08/16 h


@dataclass(frozen=True, slots=True)
class News:
    """A headline about one market or ticker, published just before agents act in a tick."""

    market_id: str
    text: str
    hints: Side  # which outcome the words suggest (of a perp: YES is up); may be wrong


@dataclass(frozen=True, slots=True)
class NpcPost:
    """What somebody who does not play posts at the beginning of a tick."""

    tick: int
    author: str
    text: str


@dataclass(frozen=True, slots=True)
class NoiseOrder:
    """A background order that moves the price before agents act in a tick."""

    market_id: str
    side: Side
    dollars: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """One seeded world. ``news`` and ``noise`` hold one entry a tick (``None``: nothing happens);
    ``start_minute`` is the minute of the day (UTC) of tick 0."""

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

    def perp(self, ticker: str) -> Perp | None:
        return next((p for p in self.perps if p.ticker == ticker), None)


class _Topic(NamedTuple):
    """What news and posts are about, while it is traded."""

    market_id: str
    truth: Side
    until: int
    words: Mapping[Side, Sequence[str]]


def make_scenario(
    seed: int | str,
    rules: Rules | None = None,
    *,
    name: str = "",
    start_minute: int | None = None,
) -> Scenario:
    """The world of a seed. ``name`` becomes the scenario id (default ``scenario-<seed>``);
    ``start_minute`` of the day is drawn where it matters and is not given.

    Raises:
        ValueError: more markets or perps than there are names for.
    """
    rules = rules or STARTER
    if max(rules.markets, rules.perps) > len(COMPANIES):
        raise ValueError(
            f"{rules.markets} markets and {rules.perps} perps: there are names for at most"
            f" {len(COMPANIES)} of each"
        )
    random = Random(f"scenario:{seed}")
    questions = _questions(random, rules)
    perps, trends = _perps(Random(f"perps:{seed}"), rules)
    topics = [_Topic(q.market_id, q.outcome, _end(q, rules), NEWS) for q in questions]
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


def _end(question: Question, rules: Rules) -> int:
    return rules.ticks if question.resolves_at is None else question.resolves_at


def _perps(random: Random, rules: Rules) -> tuple[tuple[Perp, ...], list[Side]]:
    """The perps with their geometric random walks, and which way each of them drifts."""
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
    """Prices in whole cents, as they are shown: what agents read is what they trade at."""
    price = random.uniform(50.0, 500.0)
    prices = [price]
    for _ in range(rules.ticks):
        price *= exp(drift + random.gauss(0.0, rules.volatility))
        prices.append(price)
    return tuple(round(price, 2) for price in prices)


def _open(topics: list[_Topic], tick: int) -> list[_Topic]:
    return [topic for topic in topics if tick < topic.until]


def _schedule(random: Random, topics: list[_Topic], rules: Rules) -> list[_Topic]:
    """What each tick's news is about: everything equally often, in random order; another topic
    takes the place of one that is no longer traded."""
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
    """A post every other tick."""
    posts = []
    for tick in range(0, rules.ticks, 2):
        topic = random.choice(_open(topics, tick))
        truthful = random.random() < rules.post_reliability
        words = random.choice(RUMOURS[topic.truth if truthful else topic.truth.other])
        posts.append(NpcPost(tick, random.choice(AUTHORS), f"{topic.market_id}: {words}"))
    return tuple(posts)
