"""Headlines that no policy has ever been shown: the game's subjects and predicates in new pairs.

A policy that has learned its headlines by heart, as whole lines, does not know them. One that reads
their words does.
"""

from dataclasses import replace
from random import Random

from babylon.game.market.amm import Side
from babylon.game.market.scenario import News, Scenario

NEW_NEWS = {
    Side.YES: (
        "insiders expect success",
        "sources confirm it",
        "officials raise the odds",
        "analysts are positive",
        "sources are positive",
        "officials confirm it",
    ),
    Side.NO: (
        "insiders expect failure",
        "sources deny it",
        "officials cut the odds",
        "analysts are negative",
        "sources are negative",
        "officials deny it",
    ),
}
NEW_PERP_NEWS = {
    Side.YES: (
        "analysts are buying",
        "insiders raise the target",
        "a large fund beats forecasts",
        "a leak shows record demand",
        "a large fund shows record sales",
        "sales pour in",
    ),
    Side.NO: (
        "analysts are selling",
        "insiders cut the target",
        "a large fund misses forecasts",
        "a leak shows falling demand",
        "a large fund shows falling sales",
        "sales are cancelled",
    ),
}


def reworded(scenario: Scenario) -> Scenario:
    """Return the same world with other words for each headline, which hint at the same."""
    random, tickers = Random(f"reworded:{scenario.scenario_id}"), {p.ticker for p in scenario.perps}

    def other(news: News) -> News:
        words = NEW_PERP_NEWS if news.market_id in tickers else NEW_NEWS
        return replace(news, text=random.choice(words[news.hints]))

    return replace(scenario, news=tuple(news and other(news) for news in scenario.news))
