"""The market outcomes of a window that is longer than the game's hours.

The game writes one row a market and hour. Over a longer window, a price moves from the start of its
first row to the end of its last, and a question has its last resolution and probability.
"""

from collections.abc import Iterable, Sequence

import msgspec

from babylon.store.market_outcomes import StoredOutcome

Outcome = dict[str, object]


def merge_outcomes(rows: Sequence[StoredOutcome]) -> str:
    """Return the outcomes as a JSON list, one for each market. ``rows`` are in order of time.

    Rows of one hour stay as they are.
    """
    if len({row.window_id for row in rows}) < 2:
        return f"[{', '.join(row.outcome_json for row in rows)}]"
    markets: dict[tuple[object, object], list[Outcome]] = {}
    for row in rows:
        outcome = msgspec.json.decode(row.outcome_json, type=Outcome)
        market = (outcome["stockTicker"], outcome["predictionMarketId"])
        markets.setdefault(market, []).append(outcome)
    return msgspec.json.encode([_merged(of_one) for of_one in markets.values()]).decode()


def _merged(rows: Sequence[Outcome]) -> Outcome:
    if len(rows) == 1:
        return rows[0]
    start, end = _first(rows, "startPrice"), _first(reversed(rows), "endPrice")
    change = None
    if isinstance(start, int | float) and isinstance(end, int | float) and start > 0:
        change = round(100 * (end / start - 1), 2)
    return {
        "stockTicker": rows[0]["stockTicker"],
        "startPrice": start,
        "endPrice": end,
        "changePercent": change,
        "sentiment": None,  # the game's word for one hour
        "newsEvents": [event for row in rows for event in _news(row)] or None,
        "predictionMarketId": rows[0]["predictionMarketId"],
        **{
            name: _first(reversed(rows), name)
            for name in ("question", "outcome", "finalProbability")
        },
    }


def _first(rows: Iterable[Outcome], name: str) -> object:
    return next((row[name] for row in rows if row[name] is not None), None)


def _news(row: Outcome) -> list[object]:
    news = row["newsEvents"]
    if news is None:
        return []
    return news if isinstance(news, list) else [news]
