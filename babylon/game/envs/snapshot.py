"""The scalar game's state as the arrays of the vectorised core.

The scalar environments compute observations from it, and tests compare the two games with it.
"""

from collections.abc import Sequence

from babylon.game.envs.ledger import Ledger, blank
from babylon.game.market.amm import INITIAL_RESERVE, Side
from babylon.game.market.market import Market
from babylon.game.market.perps import Direction


def ledger_of(market: Market, names: Sequence[str]) -> Ledger:
    """Return a ledger of one row with the named accounts.

    A resolved question has no pool; its reserves are the initial ones.
    """
    questions, listed = market.scenario.questions, market.scenario.perps
    ledger = blank(1, len(names), len(questions), len(listed))
    ledger.tick[0] = market.tick
    ledger.exchange[0] = market.exchange.balance
    ledger.reserves[:] = INITIAL_RESERVE
    ledger.clear_positions(...)
    columns = {question.market_id: column for column, question in enumerate(questions)}
    for market_id, pool in market.predictions.pools.items():
        ledger.open[0, columns[market_id]] = True
        ledger.reserves[0, columns[market_id]] = pool.yes, pool.no
        ledger.pairs[0, columns[market_id]] = market.predictions.pairs[market_id]
    tickers = {perp.ticker: column for column, perp in enumerate(listed)}
    for trader, name in enumerate(names):
        account = market.accounts[name]
        ledger.balance[0, trader] = account.balance
        for (market_id, side), holding in account.holdings.items():
            which = 0 if side is Side.YES else 1
            ledger.shares[0, trader, columns[market_id], which] = holding.shares
        for (ticker, direction), position in account.positions.items():
            where = (0, trader, tickers[ticker], 0 if direction is Direction.LONG else 1)
            ledger.size[where], ledger.margin[where] = position.size, position.margin
            ledger.entry[where], ledger.limit[where] = position.entry, position.liquidation_price
    return ledger
