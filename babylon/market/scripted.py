"""Scripted agents of known skill: opponents, teachers of the embedded base model, yardsticks.

An agent is a function of the game and a random stream. The oracle alone looks at ground truth.
"""

from collections.abc import Callable
from random import Random

from babylon.market.amm import Side
from babylon.market.game import Game
from babylon.market.orders import Decision, Hold, Order, OrderKind

ScriptedAgent = Callable[[Game, Random], Decision]
AMOUNTS = (25, 50, 100, 150)


def buy(market: str, side: Side, amount: float) -> Order:
    return Order(market, OrderKind.BUY_YES if side is Side.YES else OrderKind.BUY_NO, amount)


def random_trader(game: Game, random: Random) -> Decision:
    """A random side of a random market, a random amount."""
    question = random.choice(game.scenario.questions)
    return buy(question.market_id, random.choice([*Side]), random.choice(AMOUNTS))


def news_follower(game: Game, random: Random) -> Decision:
    """Believes every headline."""
    news = game.scenario.news[game.tick]
    return buy(news.market_id, news.hints, random.choice(AMOUNTS))


def contrarian(game: Game, random: Random) -> Decision:
    """Believes the opposite of every headline."""
    news = game.scenario.news[game.tick]
    return buy(news.market_id, news.hints.other, random.choice(AMOUNTS))


def momentum(game: Game, random: Random) -> Decision:
    """Buys the side that the price already favours most."""
    market, pool = max(game.pools.items(), key=lambda item: abs(item[1].probability - 0.5))
    side = Side.YES if pool.probability >= 0.5 else Side.NO
    return buy(market, side, random.choice(AMOUNTS))


def holder(game: Game, random: Random) -> Decision:
    """Never trades."""
    return Hold()


def oracle(game: Game, random: Random) -> Decision:
    """Knows every outcome and stakes the most it may where a winning share is cheapest."""
    rules = game.scenario.rules
    amount = min(rules.max_order, game.balance)
    if amount < 1:
        return Hold()
    question = min(game.scenario.questions, key=lambda q: game.pools[q.market_id].price(q.outcome))
    return buy(question.market_id, question.outcome, amount)


SCRIPTED_AGENTS: dict[str, ScriptedAgent] = {
    "random": random_trader,
    "news": news_follower,
    "contrarian": contrarian,
    "momentum": momentum,
    "hold": holder,
    "oracle": oracle,
}
