"""A fleet's rows as the scenario that it played, to the last digit.

The crowd's orders are recorded nowhere, but what they did is: in each tick the recorded decisions
are played in a market without a crowd, and what is then missing to the reserves that agents saw is
the crowd's order. So every balance and reserve of every row is checked against the game on the way,
and the P&L at the end; a play that this game could not have produced is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import msgspec

from babylon.core.errors import ReplayError
from babylon.dataset.replay.recorded import (
    Rebuilt,
    RecordedPlay,
    RecordedRow,
    RecordedScenario,
    Skipped,
)
from babylon.game.market.amm import Pool, Side
from babylon.game.market.game import make_market
from babylon.game.market.market import Market
from babylon.game.market.observed import SeenGame, SeenTick
from babylon.game.market.orders import parse_decision
from babylon.game.market.scenario import News, NoiseOrder, NpcPost, Perp, Question, Scenario

_TOLERANCE = 1e-6  # shares; reserves are hundreds, and floats have sixteen digits
_CENT = 0.01
Noise = tuple[NoiseOrder | None, ...]
_REMEDY = "the rows were changed, or are another version's of the game"


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A row that says what replay needs."""

    row: RecordedRow
    seen: list[SeenTick]
    play: RecordedPlay


def is_observed(row: RecordedRow) -> bool:
    """Was the row written by a fleet that noted what replay needs?"""
    return row.steps[0].environment_state.market is not None


def rebuild(rows: Sequence[RecordedRow]) -> Rebuilt:
    """The scenarios that ``rows`` of one name were recorded in (fleets of one hour and seed give
    the same name to worlds of other rules or lengths), and the rows of which something was not
    recorded or does not follow from the game's rules."""
    worlds: dict[tuple[Scenario, tuple[str, ...]], list[_Recorded]] = {}
    skipped: list[Skipped] = []
    for row in rows:
        try:
            seen = seen_ticks(row)
            if (game := seen[0].game) is None:
                raise ReplayError(f"{_name(row)}: the first step does not say what game it is")
            world = _skeleton(row, game, seen), game.players if len(game.players) > 1 else ()
            recorded = _Recorded(row, seen, recorded_play(row))
        except ReplayError as error:
            skipped.append(_skipped(row, error))
        else:
            worlds.setdefault(world, []).append(recorded)
    scenarios = []
    for (scenario, players), table in worlds.items():
        rebuilt, left_out = _rebuilt(scenario, players, table)
        scenarios += rebuilt
        skipped += left_out
    return Rebuilt(tuple(scenarios), tuple(skipped))


def _rebuilt(
    scenario: Scenario, players: tuple[str, ...], recorded: Sequence[_Recorded]
) -> tuple[list[RecordedScenario], list[Skipped]]:
    """A market that is shared stands or falls as a whole; in copies of one, every row by itself,
    and most of them say what the crowd did."""
    crowds: list[tuple[Noise, list[_Recorded]]] = []
    skipped = []
    for table in [recorded] if players else [[one] for one in recorded]:
        try:
            noise = _noise(scenario, table, players)
        except ReplayError as error:
            skipped.append(_skipped(table[0].row, error))
            continue
        for known, members in crowds:
            if _agree(known, noise):
                members += table
                break
        else:
            crowds.append((noise, [*table]))
    if not crowds:
        return [], skipped
    noise, most = max(crowds, key=lambda crowd: len(crowd[1]))
    for _, others in crowds:
        if others is not most:
            skipped += [_skipped(one.row, _another_crowd(one.row)) for one in others]
    rebuilt = RecordedScenario(
        window_id=recorded[0].row.window_id,
        scenario=replace(scenario, noise=noise),
        plays=tuple(one.play for one in most),
        players=players,
    )
    return [rebuilt], skipped


def _agree(one: Noise, other: Noise) -> bool:
    """Is it the same crowd? Orders are found as differences of floats."""
    return all(
        a == b
        or (a and b and (a.market_id, a.side) == (b.market_id, b.side)
            and abs(a.dollars - b.dollars) <= _TOLERANCE)
        for a, b in zip(one, other, strict=True)
    )  # fmt: skip


def _another_crowd(row: RecordedRow) -> ReplayError:
    return ReplayError(
        f"{_name(row)}: its prices are not those that most agents of the scenario saw: {_REMEDY}"
    )


def _skipped(row: RecordedRow, error: ReplayError) -> Skipped:
    return Skipped(window_id=row.window_id, scenario_id=row.scenario_id, reason=str(error))


def seen_ticks(row: RecordedRow) -> list[SeenTick]:
    """What the agent saw in each tick."""
    ticks = []
    for index, step in enumerate(row.steps):
        try:
            ticks.append(msgspec.convert(step.environment_state.market, SeenTick))
        except msgspec.ValidationError as error:
            raise ReplayError(
                f"{_name(row)}: step {index} does not say how the market stood ({error})"
            ) from error
    if [seen.tick for seen in ticks] != [*range(len(ticks))]:
        raise ReplayError(f"{_name(row)}: its steps are ticks {[seen.tick for seen in ticks]}")
    return ticks


def recorded_play(row: RecordedRow) -> RecordedPlay:
    """The replies of a row, one a step."""
    replies = [step.reply for step in row.steps]
    if None in replies:
        raise ReplayError(f"{_name(row)}: step {replies.index(None)} has no reply")
    return RecordedPlay(
        trajectory_id=row.trajectory_id,
        agent_id=row.agent_id,
        replies=tuple(reply for reply in replies if reply is not None),
        pnl_usd=row.pnl_usd,
    )


def _skeleton(row: RecordedRow, game: SeenGame, seen: list[SeenTick]) -> Scenario:
    """The scenario without its crowd."""
    if len(seen) != game.rules.ticks:
        raise ReplayError(f"{_name(row)}: {len(seen)} of {game.rules.ticks} ticks are recorded")
    return Scenario(
        scenario_id=row.scenario_id,
        rules=game.rules,
        questions=tuple(
            Question(q.market_id, q.text, outcome_of(row, q.market_id), q.resolves_at)
            for q in game.questions
        ),
        news=tuple(_news(tick) for tick in seen),
        noise=(None,) * len(seen),
        perps=tuple(
            Perp(
                ticker=perp.ticker,
                name=perp.name,
                prices=(*_prices(row, perp.ticker, seen), _last_price(row, perp.ticker)),
                funding_rate=perp.funding_rate,
            )
            for perp in game.perps
        ),
        posts=tuple(
            NpcPost(tick.tick, post.author, post.text) for tick in seen for post in tick.posts
        ),
        start_minute=game.start_minute,
    )


def _news(seen: SeenTick) -> News | None:
    if seen.news is None:
        return None
    return News(seen.news.market_id, seen.news.text, seen.news.hints)


def outcome_of(row: RecordedRow, market_id: str) -> Side:
    """How a question was resolved: by what the game knew, else by the window's outcomes."""
    known = row.knowledge.get("actualOutcomes")
    outcome = known.get(market_id) if isinstance(known, dict) else None
    ids = (market_id, f"{row.scenario_id}:{market_id}")
    told = [o.get("outcome") for o in row.outcomes if o.get("predictionMarketId") in ids]
    outcome = str(outcome or next(iter(told), None))
    if outcome not in [*Side]:
        raise ReplayError(
            f"{_name(row)}: nobody recorded how {market_id} was resolved: it is neither in"
            " gameKnowledge.actualOutcomes nor in market_outcomes"
        )
    return Side(outcome)


def _prices(row: RecordedRow, ticker: str, seen: list[SeenTick]) -> list[float]:
    prices = [price.price for tick in seen for price in tick.prices if price.ticker == ticker]
    if len(prices) != len(seen):
        raise ReplayError(f"{_name(row)}: {len(prices)} of {len(seen)} prices of {ticker}")
    return prices


def _last_price(row: RecordedRow, ticker: str) -> float:
    """The price after the last tick, at which open positions were closed."""
    known = row.knowledge.get("futureOutcomes")
    ends = known.get(ticker) if isinstance(known, dict) else None
    price = ends.get("endPrice") if isinstance(ends, dict) else None
    if not isinstance(price, int | float):
        raise ReplayError(
            f"{_name(row)}: the last price of {ticker} is not in gameKnowledge.futureOutcomes"
        )
    return float(price)


def _noise(scenario: Scenario, table: Sequence[_Recorded], players: tuple[str, ...]) -> Noise:
    """The crowd's orders of one market, in which all of ``table`` played."""
    market, row = make_market(scenario), table[0].row
    replies = {one.row.agent_id: one.play.replies for one in table}
    seats = players or (row.agent_id,)
    if lacking := [name for name in seats if name not in replies]:
        raise ReplayError(
            f"{_name(row)}: {', '.join(lacking)} played in the same market and were not recorded"
        )
    if len(table) > len(replies):
        raise ReplayError(
            f"{_name(row)}: {len(table)} trajectories of {len(players)} players: several fleets"
            " shared a market of this name, and which belong together is not recorded"
        )
    for name in seats:
        market.join(name)
    noise = []
    for tick in range(scenario.rules.ticks):
        noise.append(_catch_up(market, row, table[0].seen[tick]))
        for one in table:
            state = one.row.steps[tick].environment_state
            _check_balance(market, one.row, state.agent_balance, f"in tick {tick}")
            _check(market, one.row, one.seen[tick])
        market.step({name: parse_decision(replies[name][tick]) for name in seats})
    market.settle()
    for one in table:
        final = scenario.rules.start_balance + one.row.pnl_usd
        _check_balance(market, one.row, final, "at the end")
    return tuple(noise)


def _check_balance(market: Market, row: RecordedRow, recorded: float, when: str) -> None:
    own = market.accounts[row.agent_id].balance
    if abs(own - recorded) > _CENT:
        raise ReplayError(
            f"{_name(row)}: {when} its balance is ${recorded:.2f}, its recorded decisions lead to"
            f" ${own:.2f}: {_REMEDY}"
        )


def _catch_up(market: Market, row: RecordedRow, seen: SeenTick) -> NoiseOrder | None:
    """The crowd's order that makes the market what the agent saw; it is carried out."""
    pools = market.predictions.pools
    if [*pools] != [pool.market_id for pool in seen.pools]:
        raise ReplayError(
            f"{_name(row)}: in tick {seen.tick} the markets {', '.join(pools)} are open, recorded"
            f" are {', '.join(pool.market_id for pool in seen.pools)}"
        )
    orders = []
    for pool in seen.pools:
        own = pools[pool.market_id]
        bought_yes, bought_no = pool.no - own.no, pool.yes - own.yes
        side = Side.YES if bought_yes > 0 else Side.NO
        dollars = max(bought_yes, bought_no)
        if abs(dollars) > _TOLERANCE:
            orders.append(NoiseOrder(pool.market_id, side, dollars))
    if len(orders) > 1:
        raise ReplayError(
            f"{_name(row)}: in tick {seen.tick} the prices of"
            f" {', '.join(order.market_id for order in orders)} are not those that the recorded"
            f" decisions lead to: {_REMEDY}"
        )
    for order in orders:
        market.predictions.crowd(order.market_id, order.side, order.dollars)
    return orders[0] if orders else None


def _check(market: Market, row: RecordedRow, seen: SeenTick) -> None:
    for pool in seen.pools:
        own: Pool = market.predictions.pools[pool.market_id]
        if max(abs(own.yes - pool.yes), abs(own.no - pool.no)) > _TOLERANCE:
            raise ReplayError(
                f"{_name(row)}: in tick {seen.tick} the reserves of {pool.market_id} are"
                f" {pool.yes:g}/{pool.no:g}, no order leads there from {own.yes:g}/{own.no:g}"
            )


def _name(row: RecordedRow) -> str:
    return f"trajectory {row.trajectory_id} of scenario {row.scenario_id}"


def by_scenario(rows: Sequence[RecordedRow]) -> list[list[RecordedRow]]:
    """Rows of one window and scenario together, in order of their names."""
    ordered = sorted(rows, key=lambda r: (r.window_id, r.scenario_id, r.trajectory_id))
    return [list(group) for _, group in groupby(ordered, lambda r: (r.window_id, r.scenario_id))]
