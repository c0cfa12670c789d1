"""Rebuild a window of the live game as a scenario, from the prices that its rows contain.

Agents of the live game record the prices they look at: provider accesses whose data has a
``ticker`` and a ``price``. All agents face the same market, so the sightings form one path per
ticker: the last price seen in each minute, held until the next sighting. The window's market
outcomes give the first and the last price. Prediction markets cannot be replayed, because only
their end is recorded. Unknown data is listed in ``missing``, never invented. A straight line
between a known start and a known end is drawn only on request.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from babylon.core.errors import ReplayError
from babylon.evaluation.rebuild.recorded import (
    RecordedPlay,
    RecordedRow,
    RecordedScenario,
    RecordedStep,
)
from babylon.game.market.orders import Hold, render_decision
from babylon.game.market.scenario import DAY_MINUTES, Perp, Rules, Scenario

Sightings = dict[int, float]  # minute since 1970 → last price seen in it


def rebuild_live(rows: Sequence[RecordedRow], *, interpolate: bool = False) -> RecordedScenario:
    """Rebuild a window's perps, minute by minute from the first recorded step to the last.

    Args:
        interpolate: Draw a straight line for a ticker with only a first and a last price.

    Raises:
        ReplayError: The rows contain no price history; the message lists what is missing.
    """
    minutes = [_minute(step) for row in rows for step in row.steps]
    begin, end = min(minutes), max(minutes)
    # No window is longer than a day, so a time must be wrong.
    if end - begin > DAY_MINUTES:
        raise ReplayError(f"{_name(rows[0])}: its steps are {end - begin} minutes apart")
    seen = _sightings(rows)
    ends = _ends(rows[0])
    paths: dict[str, tuple[float, ...]] = {}
    missing: list[str] = []
    drawn = False
    for ticker in sorted(seen.keys() | ends.keys()):
        start, last = ends.get(ticker, (None, None))
        sightings = seen.get(ticker, {})
        if path := _path(sightings, start, last, begin, end):
            paths[ticker] = path
            if begin not in sightings:
                missing.append(
                    f"{_why(ticker, sightings, begin)}; until then it is the window's first price"
                )
        elif not sightings and interpolate and start is not None and last is not None:
            ticks = end - begin + 1
            paths[ticker] = tuple(start + (last - start) * i / ticks for i in range(ticks + 1))
            drawn = True
        else:
            missing.append(_why(ticker, sightings, begin))
    missing += [
        f"question {outcome['predictionMarketId']}: only its last probability is recorded"
        for outcome in rows[0].outcomes
        if outcome.get("predictionMarketId")
    ]
    if not paths:
        raise ReplayError(f"{_name(rows[0])}: no price history is recorded ({'; '.join(missing)})")
    return RecordedScenario(
        window_id=rows[0].window_id,
        scenario=_scenario(rows, paths, begin, end),
        plays=tuple(_play(row, begin, end) for row in rows),
        prices="interpolated" if drawn else "seen",
        missing=tuple(missing),
    )


def _scenario(
    rows: Sequence[RecordedRow], paths: dict[str, tuple[float, ...]], begin: int, end: int
) -> Scenario:
    """Return the scenario: perps only, without news, feed or crowd.

    The start balance is the most common first balance: most agents begin with it.
    """
    balances = Counter(row.steps[0].environment_state.agent_balance for row in rows)
    ticks = end - begin + 1
    start_balance = balances.most_common(1)[0][0]
    return Scenario(
        scenario_id=rows[0].scenario_id,
        rules=Rules(
            markets=0,
            perps=len(paths),
            ticks=ticks,
            start_balance=start_balance,
            max_order=start_balance,
        ),
        questions=(),
        news=(None,) * ticks,
        noise=(None,) * ticks,
        perps=tuple(Perp(ticker=t, name=t, prices=prices) for t, prices in paths.items()),
        start_minute=begin % DAY_MINUTES,
    )


def _sightings(rows: Sequence[RecordedRow]) -> dict[str, Sightings]:
    seen: list[tuple[RecordedStep, str, float]] = []
    for row in rows:
        for step in row.steps:
            for access in step.provider_accesses:
                if isinstance(data := access.data, dict):
                    ticker, price = data.get("ticker"), data.get("price")
                    if isinstance(ticker, str) and isinstance(price, int | float) and price > 0:
                        seen.append((step, ticker, float(price)))
    paths: defaultdict[str, Sightings] = defaultdict(dict)
    for step, ticker, price in sorted(seen, key=lambda one: one[0].timestamp):
        paths[ticker][_minute(step)] = price
    return dict(paths)


def _ends(row: RecordedRow) -> dict[str, tuple[float, float]]:
    return {
        ticker: (float(start), float(end))
        for outcome in row.outcomes
        if (ticker := outcome.get("stockTicker"))
        and (start := outcome.get("startPrice"))
        and (end := outcome.get("endPrice"))
    }


def _path(
    seen: Sightings, start: float | None, last: float | None, begin: int, end: int
) -> tuple[float, ...]:
    """Return one price per minute and the last one; empty if the first price is unknown."""
    price = seen.get(begin, start)
    if not seen or price is None:
        return ()
    prices = []
    for minute in range(begin, end + 1):
        price = seen.get(minute, price)
        prices.append(price)
    return (*prices, price if last is None else last)


def _why(ticker: str, seen: Sightings, begin: int) -> str:
    if seen:
        return f"{ticker}: no price was seen before minute {min(seen) - begin}"
    return f"{ticker}: only its first and last price are recorded"


def _play(row: RecordedRow, begin: int, end: int) -> RecordedPlay:
    """Return an agent's play: the last reply of each minute, or a hold in a minute without one."""
    replies = dict.fromkeys(range(begin, end + 1), render_decision(Hold()))
    replies.update({_minute(step): step.reply for step in row.steps if step.reply is not None})
    return RecordedPlay(
        trajectory_id=row.trajectory_id,
        agent_id=row.agent_id,
        replies=tuple(replies.values()),
        pnl_usd=row.pnl_usd,
    )


def _minute(step: RecordedStep) -> int:
    return int(step.timestamp // 60_000)


def _name(row: RecordedRow) -> str:
    return f"window {row.window_id}, scenario {row.scenario_id}"
