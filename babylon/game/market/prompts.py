"""The prompts of LLM agents.

The system prompt comes first, then the market, then the agent's own account. Agents of a market
therefore share a prefix, which engines can cache. The small game has a shorter prompt, because its
model is small. A prompt describes only actions that the rules allow, and shows no ground truth.
"""

from hashlib import blake2b

from babylon.game.market.account import Position
from babylon.game.market.feed import MAX_CONTENT, FeedPost, one_line
from babylon.game.market.market import Seat
from babylon.game.market.perps import FUNDING_MINUTES, MAX_LEVERAGE, MIN_SIZE
from babylon.game.market.scenario import News, Rules, Scenario

SYSTEM_PROMPT = (
    "You trade prediction markets. A winning share pays $1. Answer with one JSON object: "
    '{"action":"hold"} or {"action":"trade","trade":{"type":"prediction","market":ID,'
    '"action":"buy_yes" or "buy_no" or "sell","amount":N}}'
)
STRATEGIES = (
    "cautious: small stakes, little leverage, never everything on one market",
    "balanced: stakes by the strength of the evidence",
    "bold: large stakes as soon as the evidence is clear",
    "watchful: waits for prices to leave what the news supports",
)
RECENT = 5  # number of headlines and of posts shown
MOVERS = 3  # number of top gainers and of top losers shown
MAX_ERROR = 160  # characters
NAMES = 64  # number of agents' names in transcripts, in the arena and in environments


def name_of_agent(number: int) -> str:
    """Return the name that a fleet's agent has in its prompts."""
    return f"agent-{number}"


def names_of(scenario: Scenario, seats: int) -> list[str]:
    """Return the names of a world's players, which are those of a fleet's agents.

    The world's id decides, so both sides of a match have the same names. A small model answers
    worse under a name that no agent of its training had.
    """
    drawn = blake2b(scenario.scenario_id.encode(), digest_size=8).digest()
    first = int.from_bytes(drawn) % NAMES
    return [name_of_agent((first + seat) % max(NAMES, seats)) for seat in range(seats)]


def render_observation(game: Seat, agent_name: str) -> list[dict[str, str]]:
    """Return the chat messages of one tick: a system and a user message."""
    scenario = game.scenario
    timed = any(question.resolves_at is not None for question in scenario.questions)
    if not (timed or scenario.perps or scenario.rules.feed):
        system, lines = SYSTEM_PROMPT, _small_game(game, agent_name)
    else:
        system = system_prompt(scenario.rules)
        lines = [*_market(game), *_private(game, agent_name)]
    return [{"role": "system", "content": system}, {"role": "user", "content": "\n".join(lines)}]


def _small_game(game: Seat, agent_name: str) -> list[str]:
    lines = [f"{question.market_id} {question.text}" for question in game.scenario.questions]
    if news := game.scenario.news[game.tick]:
        lines.append(_headline(news))
    prices = " ".join(f"{market} {pool.probability:.2f}" for market, pool in game.pools.items())
    lines.append(f"YES prices: {prices}")
    positions = " ".join(
        f"{market} {side.value} {holding.shares:.0f}"
        for (market, side), holding in game.holdings.items()
    )
    lines.append(f"Positions: {positions or 'none'}")
    lines.append(f"{agent_name}, balance ${game.balance:.0f}, P&L ${game.pnl:+.0f}.")
    return lines


def system_prompt(rules: Rules) -> str:
    """Return the system prompt: the rules and the format of replies."""
    fields = ["prediction markets", *(["perpetual futures"] if rules.perps else [])]
    lines = [
        f"You trade {' and '.join(fields)}{', and write on a feed' if rules.feed else ''}."
        " You decide once a minute. When a question resolves, a winning share pays $1 and a losing"
        f" one nothing. A trade costs {rules.fee:.1%} and takes at most ${rules.max_order:g} from"
        " your balance."
    ]
    if rules.perps:
        lines.append(
            "A perp position of N dollars at leverage L takes a margin of N/L and makes N times the"
            " price's change. When nine tenths of its margin are lost it is liquidated, and the"
            f" margin is gone. Every {FUNDING_MINUTES // 60} hours longs pay the funding rate on"
            " their size and shorts receive it; the other way round when it is negative."
        )
    lines.append("Answer with one JSON object, one of:")
    lines.append('{"action":"hold"}')
    lines.append(
        '{"action":"trade","trade":{"type":"prediction","market":ID,"action":"buy_yes" or "buy_no"'
        ' or "sell","amount":N,"reasoning":WHY}} - N dollars to spend, or shares to sell'
    )
    if rules.perps:
        lines.append(
            '{"action":"trade","trade":{"type":"perp","market":TICKER,"action":"open_long" or'
            ' "open_short" or "close","amount":N,"leverage":L,"reasoning":WHY}} - a size of at'
            f" least ${MIN_SIZE:g}, leverage 1 to {MAX_LEVERAGE:g}; close closes all of it"
        )
    if rules.feed:
        lines.append('{"action":"post","content":TEXT}')
        lines.append(
            '{"action":"comment","post":ID,"content":TEXT}'
            f" - texts of at most {MAX_CONTENT} characters"
        )
    return "\n".join(lines)


def _market(game: Seat) -> list[str]:
    """Return the lines about the market.

    Constant lines come first, so that the prompts of an hour share a longer prefix. Prices that the
    agent's own trades move come last, so that all agents of a minute share the text before them.
    """
    minute, ticks = game.market.minute_of_day, game.scenario.rules.ticks
    lines = ["Questions:"]
    lines += [
        f"{q.market_id} {q.text} Traded until minute {q.resolves_at or ticks}."
        for q in game.scenario.questions
    ]
    now = f"It is {_clock(minute)} UTC, minute {game.tick + 1} of {ticks}"
    if perps := game.scenario.perps:
        lines.append("Perpetual futures:")
        lines += [f"{p.ticker} {p.name}, funding {p.funding_rate:+.3%}" for p in perps]
        due = _clock(minute + FUNDING_MINUTES - minute % FUNDING_MINUTES)
        now += f", next funding at {due}"
    lines += [f"{now}.", *_perps(game)]
    if news := _earlier_news(game):
        lines += ["Earlier news:", *news]
    if headline := game.scenario.news[game.tick]:
        lines.append(_headline(headline))
    if posts := game.market.feed.posts[-RECENT:]:
        lines += ["Feed:", *(line for post in posts for line in _post(post))]
    return [*lines, "Prices:", *_questions(game)]


def _questions(game: Seat) -> list[str]:
    lines = []
    for question in game.scenario.questions:
        name = question.market_id
        if pool := game.pools.get(name):
            lines.append(
                f"{name} YES ${pool.probability:.2f}, NO ${1 - pool.probability:.2f},"
                f" YES/NO shares {pool.yes:.0f}/{pool.no:.0f}"
            )
        else:
            lines.append(f"{name} resolved {game.market.predictions.resolved[name].value}")
    return lines


def _perps(game: Seat) -> list[str]:
    prices = game.prices
    moves = {p.ticker: prices[p.ticker] / p.prices[0] - 1.0 for p in game.scenario.perps}
    lines = [f"{ticker} ${prices[ticker]:.2f} ({move:+.1%})" for ticker, move in moves.items()]
    ranked = sorted(moves, key=lambda ticker: -moves[ticker])
    for title, tickers in (
        ("Top gainers", [t for t in ranked if moves[t] > 0][:MOVERS]),
        ("Top losers", [t for t in reversed(ranked) if moves[t] < 0][:MOVERS]),
    ):
        if tickers:
            lines.append(f"{title}: {', '.join(f'{t} {moves[t]:+.1%}' for t in tickers)}")
    return lines


def _earlier_news(game: Seat) -> list[str]:
    told = [
        f"minute {tick + 1}, {news.market_id}: {news.text}."
        for tick, news in enumerate(game.scenario.news[: game.tick])
        if news
    ]
    return told[-RECENT:]


def _headline(news: News) -> str:
    return f"News on {news.market_id}: {news.text}."


def _post(post: FeedPost) -> list[str]:
    comments = [f"  {comment.author}: {comment.text}" for comment in post.comments[-2:]]
    return [f"{post.post_id} {post.author}: {post.text}", *comments]


def _private(game: Seat, agent_name: str) -> list[str]:
    lines = [
        f"You are {agent_name}. Strategy: {strategy_of(agent_name)}.",
        f"Balance ${game.balance:.2f}, P&L ${game.pnl:+.2f}.",
    ]
    lines.append("Open positions:")
    for (market, side), holding in game.holdings.items():
        worth = game.pools[market].sell(side, holding.shares)[1]
        lines.append(
            f"{market} {side.value} {holding.shares:.1f} shares, paid ${holding.cost:.2f},"
            f" worth ${worth:.2f}"
        )
    for (ticker, _), position in game.positions.items():
        lines.append(_position(ticker, position, game.prices[ticker]))
    if not (game.holdings or game.positions):
        lines.append("none")
    if game.outcomes and (error := game.outcomes[-1].error):
        lines.append(f"Your last action failed: {one_line(error)[:MAX_ERROR]}")
    return lines


def _position(ticker: str, position: Position, price: float) -> str:
    return (
        f"{ticker} {position.direction.value} ${position.size:.2f} from ${position.entry:.2f},"
        f" leverage {position.leverage:.1f}, liquidation at ${position.liquidation_price:.2f},"
        f" P&L ${position.pnl(price):+.2f}"
    )


def strategy_of(agent_name: str) -> str:
    """Return an agent's strategy, a function of its name only."""
    return STRATEGIES[blake2b(agent_name.encode(), digest_size=1).digest()[0] % len(STRATEGIES)]


def _clock(minute: int) -> str:
    return f"{minute // 60 % 24:02d}:{minute % 60:02d}"
