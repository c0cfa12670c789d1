"""Small worlds in which nothing happens but what a test writes down."""

from collections.abc import Sequence

from babylon.game.market.amm import Side
from babylon.game.market.scenario import NpcPost, Perp, Question, Rules, Scenario

YES_QUESTION = Question("m1", "Will it?", Side.YES)


def perp(*prices: float, ticker: str = "OPNAI", rate: float = 0.0) -> Perp:
    return Perp(ticker=ticker, name=f"{ticker} Inc.", prices=prices, funding_rate=rate)


def quiet_world(
    *questions: Question,
    ticks: int = 4,
    fee: float = 0.0,
    perps: Sequence[Perp] = (),
    posts: Sequence[NpcPost] = (),
    feed: bool = False,
    start_minute: int = 60,
    opponents: tuple[str, ...] = (),
) -> Scenario:
    """No crowd and no news; one question that resolves YES unless others are given."""
    rules = Rules(
        markets=max(1, len(questions)),
        ticks=ticks,
        fee=fee,
        perps=len(perps),
        feed=feed,
        opponents=opponents,
    )
    return Scenario(
        scenario_id="quiet",
        rules=rules,
        questions=questions or (YES_QUESTION,),
        news=(None,) * ticks,
        noise=(None,) * ticks,
        perps=tuple(perps),
        posts=tuple(posts),
        start_minute=start_minute,
    )
