"""Scripted agents of known skill: opponents, teachers of the embedded base model, yardsticks.

An agent is a function of its seat and a random stream. Only the oracle reads the ground truth. If
the rules have perps, all agents but ``hold`` trade them. If the rules have a feed, all but ``hold``
and ``oracle`` write on it now and then.
"""

from collections.abc import Callable
from math import ceil, floor
from random import Random

from babylon.game.market.amm import Side
from babylon.game.market.market import Seat
from babylon.game.market.orders import Comment, Decision, Hold, Order, OrderKind, Post
from babylon.game.market.perps import LIQUIDATED_SHARE, MAX_LEVERAGE, MIN_SIZE, Direction
from babylon.game.market.scenario import Perp

ScriptedAgent = Callable[[Seat, Random], Decision]
AMOUNTS = (25, 50, 100, 150)
LEVERAGE = 5.0
LEVERAGES = (2.0, 5.0, 20.0, MAX_LEVERAGE)
CHATTER = 0.1  # share of the ticks in which a sociable agent writes on the feed


def buy(market: str, side: Side, amount: float) -> Order:
    return Order(market, OrderKind.BUY_YES if side is Side.YES else OrderKind.BUY_NO, amount)


def stake_on(
    seat: Seat, market: str, side: Side, stake: float, leverage: float = LEVERAGE
) -> Decision:
    """Stake ``stake`` dollars, or as much as the rules and the balance allow.

    The bet is on a side of a question, or on a perp's rise (YES) or fall (NO). An open position in
    the other direction is closed instead.
    """
    left = min(stake, seat.scenario.rules.max_order, floor(seat.balance))
    if market in seat.pools:
        return buy(market, side, left) if left >= 1 else Hold()
    if market not in seat.prices:
        return Hold()  # it is resolved
    way = Direction.LONG if side is Side.YES else Direction.SHORT
    if (market, way.other) in seat.positions:
        return Order(market, OrderKind.CLOSE, 0.0)
    size = floor(left * leverage / (1.0 + leverage * seat.scenario.rules.fee))  # fee included
    if size < MIN_SIZE:
        return Hold()
    kind = OrderKind.OPEN_LONG if way is Direction.LONG else OrderKind.OPEN_SHORT
    return Order(market, kind, size, leverage)


def stake_some(seat: Seat, market: str, side: Side, random: Random) -> Decision:
    """Stake a random amount, on a perp at a random leverage."""
    amount = random.choice(AMOUNTS)
    leverage = random.choice(LEVERAGES) if market in seat.prices else LEVERAGE
    return stake_on(seat, market, side, amount, leverage)


def random_trader(seat: Seat, random: Random) -> Decision:
    """Trade a random side of a random market or perp for a random amount."""
    market = random.choice([*seat.pools, *seat.prices])
    return stake_some(seat, market, random.choice([*Side]), random)


def news_follower(seat: Seat, random: Random) -> Decision:
    """Trade on every headline."""
    news = seat.scenario.news[seat.tick]
    return stake_some(seat, news.market_id, news.hints, random) if news else Hold()


def contrarian(seat: Seat, random: Random) -> Decision:
    """Trade against every headline."""
    news = seat.scenario.news[seat.tick]
    if news is None:
        return Hold()
    return stake_some(seat, news.market_id, news.hints.other, random)


def momentum(seat: Seat, random: Random) -> Decision:
    """Buy the side that the price favours most, or follow the perp that has moved furthest."""
    if seat.prices and (random.random() < 0.5 or not seat.pools):
        perp, move = max(_moves(seat), key=lambda item: abs(item[1]))
        return stake_on(seat, perp, _side(move >= 0), random.choice(AMOUNTS))
    if not seat.pools:
        return Hold()
    market, price = _furthest_from_even(seat)
    return stake_on(seat, market, _side(price >= 0.5), random.choice(AMOUNTS))


def market_maker(seat: Seat, random: Random) -> Decision:
    """Buy the cheapest side and sell it once its price is above one half.

    No order moves a perp's price. Of the perps, hold the one with the highest funding income.
    """
    for (market, side), holding in seat.holdings.items():
        if seat.pools[market].price(side) > 0.5:
            # A reply shows twelve digits: rounding up sells the whole holding after rendering, too.
            return Order(market, OrderKind.SELL, ceil(holding.shares))
    if seat.scenario.perps and not seat.positions:
        perp = max(seat.scenario.perps, key=lambda perp: abs(perp.funding_rate))
        return stake_on(seat, perp.ticker, _side(perp.funding_rate < 0), AMOUNTS[0], leverage=1.0)
    if not seat.pools:
        return Hold()
    market, price = _furthest_from_even(seat)
    return stake_on(seat, market, _side(price < 0.5), AMOUNTS[1])


def bold(seat: Seat, random: Random) -> Decision:
    """Stake the largest order on every headline."""
    news = seat.scenario.news[seat.tick]
    most = seat.scenario.rules.max_order
    return stake_on(seat, news.market_id, news.hints, most) if news else Hold()


def doubter(seat: Seat, random: Random) -> Decision:
    """Stake the largest order against every headline."""
    news = seat.scenario.news[seat.tick]
    most = seat.scenario.rules.max_order
    return stake_on(seat, news.market_id, news.hints.other, most) if news else Hold()


def tally(seat: Seat, random: Random) -> Decision:
    """Stake the largest order on what most headlines about a market have said so far."""
    market, balance = _told(seat)
    if balance == 0:
        return Hold()
    return stake_on(seat, market, _side(balance > 0), seat.scenario.rules.max_order)


def counter(seat: Seat, random: Random) -> Decision:
    """Trade on what most headlines about the last headline's market have said so far."""
    market, balance = _told(seat)
    return stake_some(seat, market, _side(balance > 0), random) if balance else Hold()


def _told(seat: Seat) -> tuple[str, int]:
    """Return the last headline's market, and its headlines for YES less those for NO."""
    told = [news for news in seat.scenario.news[: seat.tick + 1] if news]
    if not told:
        return "", 0
    market = told[-1].market_id
    return market, sum(1 if n.hints is Side.YES else -1 for n in told if n.market_id == market)


def trend(seat: Seat, random: Random) -> Decision:
    """Stake the largest order, at the highest leverage, on the perp that has moved furthest."""
    perp, move = max(_moves(seat), key=lambda item: abs(item[1]), default=("", 0.0))
    if not move:
        return Hold()
    return stake_on(seat, perp, _side(move > 0), seat.scenario.rules.max_order, MAX_LEVERAGE)


def mover(seat: Seat, random: Random) -> Decision:
    """Follow the perp that has moved furthest. Without perps, trade as ``counter`` does."""
    if not seat.prices:
        return counter(seat, random)
    perp, move = max(_moves(seat), key=lambda item: abs(item[1]))
    return stake_some(seat, perp, _side(move >= 0), random)


def holder(seat: Seat, random: Random) -> Decision:
    """Hold in every tick."""
    return Hold()


def oracle(seat: Seat, random: Random) -> Decision:
    """Stake the largest allowed order on the bet with the highest gain per dollar.

    The oracle knows all outcomes and all prices to come. It compares the cheapest winning share
    with each perp at the highest leverage that survives to the end.
    """
    stake = min(seat.scenario.rules.max_order, seat.balance)
    if stake < 1:
        return Hold()
    bets: list[tuple[float, Decision]] = []
    open_questions = [q for q in seat.scenario.questions if q.market_id in seat.pools]
    if open_questions:
        question = min(open_questions, key=lambda q: seat.pools[q.market_id].price(q.outcome))
        _, shares = seat.pools[question.market_id].buy(question.outcome, stake)
        bets.append((shares / stake - 1.0, buy(question.market_id, question.outcome, stake)))
    for perp in seat.scenario.perps:
        gain, side, leverage = _best_leverage(perp, seat)
        bets.append((gain, stake_on(seat, perp.ticker, side, stake, leverage)))
    gain, decision = max(bets, key=lambda bet: bet[0])
    return decision if gain > 0 else Hold()


def _best_leverage(perp: Perp, seat: Seat) -> tuple[float, Side, float]:
    """Return (gain per dollar of margin, side, highest leverage that survives to the end)."""
    now, *later = perp.prices[seat.tick :]
    side = _side(later[-1] >= now)
    sign = 1.0 if side is Side.YES else -1.0
    setback = max(0.0, *(sign * (1.0 - price / now) for price in later))
    leverage = min(MAX_LEVERAGE, 0.99 * LIQUIDATED_SHARE / setback) if setback else MAX_LEVERAGE
    leverage = max(1.0, floor(leverage))
    costs = 2.0 * seat.scenario.rules.fee
    return leverage * (abs(later[-1] / now - 1.0) - costs), side, leverage


def _moves(seat: Seat) -> list[tuple[str, float]]:
    perps = seat.scenario.perps
    return [(perp.ticker, seat.prices[perp.ticker] / perp.prices[0] - 1.0) for perp in perps]


def _furthest_from_even(seat: Seat) -> tuple[str, float]:
    prices = {market: pool.probability for market, pool in seat.pools.items()}
    return max(prices.items(), key=lambda item: abs(item[1] - 0.5))


def _side(yes: bool) -> Side:
    return Side.YES if yes else Side.NO


def sociable(agent: ScriptedAgent) -> ScriptedAgent:
    """Let an agent write on the feed in a share ``CHATTER`` of its ticks, if there is a feed."""

    def decide(seat: Seat, random: Random) -> Decision:
        if seat.scenario.rules.feed and random.random() < CHATTER:
            return _chatter(seat, random)
        return agent(seat, random)

    return decide


def _chatter(seat: Seat, random: Random) -> Decision:
    posts, news = seat.market.feed.posts, seat.scenario.news[seat.tick]
    if posts and (news is None or random.random() < 0.5):
        return Comment(posts[-1].post_id, random.choice(("I agree", "I doubt it", "source?")))
    return Post(f"{news.market_id}: {news.text}" if news else "a quiet minute")


SCRIPTED_AGENTS: dict[str, ScriptedAgent] = {
    "random": sociable(random_trader),
    "news": sociable(news_follower),
    "contrarian": sociable(contrarian),
    "momentum": sociable(momentum),
    "maker": sociable(market_maker),
    "counter": sociable(counter),
    "mover": sociable(mover),
    "hold": holder,
    "oracle": oracle,
}

RULES: dict[str, ScriptedAgent] = {
    "bold": bold,
    "doubter": doubter,
    "tally": tally,
    "trend": trend,
    "news": news_follower,
    "contrarian": contrarian,
    "momentum": momentum,
    "maker": market_maker,
    "hold": holder,
}
"""Rules of one line that read no ground truth: a policy should beat the best of them."""
