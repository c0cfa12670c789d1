"""The market's state as a fleet records it in each step, for exact replay.

It is the key ``market`` of the step's ``environmentState``: the market as the agent could see it
before it acted, at full precision. The first step of a scenario also holds its rules, questions,
perps and players. Nothing here is ground truth.
"""

import msgspec
from msgspec import convert

from babylon.game.market.amm import Side
from babylon.game.market.market import Seat
from babylon.game.market.scenario import Rules


class SeenQuestion(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A prediction market without its outcome."""

    market_id: str
    text: str
    resolves_at: int | None = None


class SeenPerp(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A perpetual future without its prices."""

    ticker: str
    name: str
    funding_rate: float = 0.0


class SeenGame(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The constant parts of a scenario.

    ``players`` are the accounts of the market in the order of joining. A single player means that
    each agent played its own copy of the market.
    """

    rules: Rules
    questions: tuple[SeenQuestion, ...]
    perps: tuple[SeenPerp, ...] = ()
    players: tuple[str, ...] = ()
    start_minute: int = 0


class SeenPool(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A prediction market's reserves, in shares."""

    market_id: str
    yes: float
    no: float


class SeenPrice(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A perp's price in dollars."""

    ticker: str
    price: float


class SeenNews(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A headline. ``hints`` is the outcome that its words suggest, right or wrong."""

    market_id: str
    text: str
    hints: Side


class SeenPost(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A new post of a non-player."""

    author: str
    text: str


class SeenTick(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The market in one step."""

    tick: int
    pools: tuple[SeenPool, ...]
    prices: tuple[SeenPrice, ...] = ()
    news: SeenNews | None = None
    posts: tuple[SeenPost, ...] = ()
    game: SeenGame | None = None


KEY = "market"  # of ``environmentState``


def observed(seat: Seat) -> dict[str, object]:
    """Return ``{"market": ...}``, to be merged into the step's ``environmentState``."""
    scenario = seat.scenario
    posts = [post for post in scenario.posts if post.tick == seat.tick]
    seen = SeenTick(
        tick=seat.tick,
        pools=tuple(
            SeenPool(market_id=market, yes=pool.yes, no=pool.no)
            for market, pool in seat.pools.items()
        ),
        prices=tuple(
            SeenPrice(ticker=ticker, price=price) for ticker, price in seat.prices.items()
        ),
        news=convert(scenario.news[seat.tick], SeenNews | None, from_attributes=True),
        posts=convert(posts, tuple[SeenPost, ...], from_attributes=True),
        game=_game(seat) if seat.tick == 0 else None,
    )
    return {KEY: msgspec.to_builtins(seen)}


def _game(seat: Seat) -> SeenGame:
    scenario = seat.scenario
    return SeenGame(
        rules=scenario.rules,
        questions=convert(scenario.questions, tuple[SeenQuestion, ...], from_attributes=True),
        perps=convert(scenario.perps, tuple[SeenPerp, ...], from_attributes=True),
        # The rules' opponents joined first.
        players=tuple(seat.market.accounts)[len(scenario.rules.opponents) :],
        start_minute=scenario.start_minute,
    )
