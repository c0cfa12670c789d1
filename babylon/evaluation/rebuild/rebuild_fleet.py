"""Rebuild the exact scenario that a fleet played from its rows.

The crowd's orders are not recorded. They are recovered tick by tick: the recorded decisions are
played in a market without a crowd, and the difference to the reserves that agents saw next is the
crowd's order. This checks every balance and reserve of every row, and the final P&L. Rows that the
game could not have produced are skipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from babylon.core.errors import ReplayError, reason_of
from babylon.evaluation.rebuild.recorded import (
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
from babylon.game.market.scenario import (
    MAX_TEXT,
    News,
    NoiseOrder,
    NpcPost,
    Perp,
    Question,
    Scenario,
)
from babylon.game.market.words import COMPANIES

_TOLERANCE = 1e-6  # shares; reserves are in the hundreds, and floats have sixteen digits
_CENT = 0.01
_MOST = 1e9  # largest number that prompts show; the game's are far smaller
Noise = tuple[NoiseOrder | None, ...]
_REMEDY = "the rows were changed, or another version of the game wrote them"


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A row with its decoded market states and replies."""

    row: RecordedRow
    seen: list[SeenTick]
    play: RecordedPlay


def rebuild_fleet(rows: Sequence[RecordedRow]) -> Rebuilt:
    """Rebuild the scenarios of ``rows``, which share a scenario id.

    There may be several: fleets of the same hour and seed give worlds of different lengths the same
    id. Rows that are incomplete or contradict the game's rules are skipped.
    """
    worlds: dict[tuple[Scenario, tuple[str, ...]], list[_Recorded]] = {}
    skipped: list[Skipped] = []
    for row in rows:
        try:
            seen = seen_ticks(row)
            if (game := seen[0].game) is None:
                raise ReplayError(f"{_name(row)}: the first step has no market.game")
            _check_size(row, game, seen)
            world = _skeleton(row, game, seen), game.players if len(game.players) > 1 else ()
            recorded = _Recorded(row, seen, recorded_play(row))
        except Exception as error:  # whatever one row holds must not cost the others
            skipped.append(skipped_for(row, error))
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
    """Rebuild one scenario → (the scenario or none, skipped rows).

    A shared market is accepted or skipped as a whole. Copies of a market are checked row by row,
    and the crowd that most rows agree on is taken for the true one.
    """
    crowds: list[tuple[Noise, list[_Recorded]]] = []
    skipped = []
    for table in [recorded] if players else [[one] for one in recorded]:
        try:
            noise = _noise(scenario, table, players)
        except Exception as error:  # as above: numbers of a state may be anything
            skipped.append(skipped_for(table[0].row, error))
            continue
        for known, members in crowds:
            if _agree(known, noise):
                members += table
                break
        else:
            crowds.append((noise, [*table]))
    if not crowds:
        return [], skipped
    # The majority, and not the first row: a single damaged row must not decide.
    noise, most = max(crowds, key=lambda crowd: len(crowd[1]))
    for row in (one.row for _, others in crowds if others is not most for one in others):
        reason = f"its prices differ from those of most agents of the scenario: {_REMEDY}"
        skipped.append(skipped_for(row, ReplayError(f"{_name(row)}: {reason}")))
    rebuilt = RecordedScenario(
        window_id=recorded[0].row.window_id,
        scenario=replace(scenario, noise=noise),
        plays=tuple(one.play for one in most),
        players=players,
    )
    return [rebuilt], skipped


def _agree(one: Noise, other: Noise) -> bool:
    return all(
        a == b
        or (a and b and (a.market_id, a.side) == (b.market_id, b.side)
            and abs(a.dollars - b.dollars) <= _TOLERANCE)
        for a, b in zip(one, other, strict=True)
    )  # fmt: skip


def skipped_for(row: RecordedRow, error: Exception) -> Skipped:
    """Return the error as the reason for which a row's scenario is not rebuilt."""
    if isinstance(error, MemoryError):  # the machine's, not the row's
        raise error
    return Skipped(window_id=row.window_id, scenario_id=row.scenario_id, reason=reason_of(error))


def seen_ticks(row: RecordedRow) -> list[SeenTick]:
    """Decode the market state of each step."""
    ticks = []
    for index, step in enumerate(row.steps):
        try:
            ticks.append(msgspec.convert(step.environment_state.market, SeenTick))
        except msgspec.ValidationError as error:
            raise ReplayError(
                f"{_name(row)}: step {index} has no valid environmentState.market ({error})"
            ) from error
    if [seen.tick for seen in ticks] != [*range(len(ticks))]:
        raise ReplayError(f"{_name(row)}: its steps are ticks {[seen.tick for seen in ticks]}")
    return ticks


def recorded_play(row: RecordedRow) -> RecordedPlay:
    """Return a row's replies, one per step."""
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
    """Return the scenario without its crowd."""
    if len(seen) != game.rules.ticks:
        raise ReplayError(f"{_name(row)}: {len(seen)} of {game.rules.ticks} ticks are recorded")
    listed = {q.market_id for q in game.questions} | {perp.ticker for perp in game.perps}
    if any(tick.news and tick.news.market_id not in listed for tick in seen):
        raise ReplayError(f"{_name(row)}: a headline is about no market of the game: {_REMEDY}")
    return Scenario(
        scenario_id=row.scenario_id,
        rules=game.rules,
        questions=tuple(
            Question(q.market_id, q.text, outcome_of(row, q.market_id), q.resolves_at)
            for q in game.questions
        ),
        news=tuple(msgspec.convert(tick.news, News | None, from_attributes=True) for tick in seen),
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


def _check_size(row: RecordedRow, game: SeenGame, seen: list[SeenTick]) -> None:
    """Refuse a market of which the prompts could be longer than those of made ones.

    An engine refuses what does not fit, and each match in which the world is played would fail.
    """
    listed, known = [len(game.questions), len(game.perps)], [game.rules.markets, game.rules.perps]
    if listed != known or max(listed) > len(COMPANIES):
        raise ReplayError(
            f"{_name(row)}: {listed} questions and perps are recorded, by its rules there are"
            f" {known}, and at most {len(COMPANIES)} of each are possible: {_REMEDY}"
        )
    texts = [text for q in game.questions for text in (q.market_id, q.text)]
    texts += [text for perp in game.perps for text in (perp.ticker, perp.name)]
    texts += [tick.news.text for tick in seen if tick.news]
    texts += [text for tick in seen for post in tick.posts for text in (post.author, post.text)]
    if (longest := max((len(text.encode()) for text in texts), default=0)) > MAX_TEXT:
        raise ReplayError(
            f"{_name(row)}: a text of its market has {longest} bytes, those of the game have at"
            f" most {MAX_TEXT}: {_REMEDY}"
        )
    # A number may have three hundred digits.
    numbers = [game.rules.start_balance, game.rules.fee]
    numbers += [perp.funding_rate for perp in game.perps]
    numbers += [price.price for tick in seen for price in tick.prices]
    numbers += [shares for tick in seen for pool in tick.pools for shares in (pool.yes, pool.no)]
    if (largest := max(map(abs, numbers))) > _MOST:
        raise ReplayError(f"{_name(row)}: its market has the number {largest:g}: {_REMEDY}")


def outcome_of(row: RecordedRow, market_id: str) -> Side:
    """Return a question's outcome from the game's knowledge, else from the market outcomes."""
    known = row.knowledge.get("actualOutcomes")
    outcome = known.get(market_id) if isinstance(known, dict) else None
    ids = (market_id, f"{row.scenario_id}:{market_id}")
    told = [o.get("outcome") for o in row.outcomes if o.get("predictionMarketId") in ids]
    outcome = str(outcome or next(iter(told), None))
    if outcome not in [*Side]:
        raise ReplayError(
            f"{_name(row)}: the outcome of {market_id} is neither in gameKnowledge.actualOutcomes"
            " nor in market_outcomes"
        )
    return Side(outcome)


def _prices(row: RecordedRow, ticker: str, seen: list[SeenTick]) -> list[float]:
    prices = [price.price for tick in seen for price in tick.prices if price.ticker == ticker]
    if len(prices) != len(seen):
        raise ReplayError(f"{_name(row)}: {len(prices)} of {len(seen)} prices of {ticker}")
    if min(prices) < _CENT:  # nobody can trade at 0, and the game has whole cents
        raise ReplayError(f"{_name(row)}: a price of {ticker} is below one cent: {_REMEDY}")
    return prices


def _last_price(row: RecordedRow, ticker: str) -> float:
    """Return the price after the last tick, at which open positions were closed."""
    known = row.knowledge.get("futureOutcomes")
    ends = known.get(ticker) if isinstance(known, dict) else None
    price = ends.get("endPrice") if isinstance(ends, dict) else None
    if not isinstance(price, int | float):
        raise ReplayError(
            f"{_name(row)}: the last price of {ticker} is not in gameKnowledge.futureOutcomes"
        )
    return float(price)


def _noise(scenario: Scenario, table: Sequence[_Recorded], players: tuple[str, ...]) -> Noise:
    """Recover the crowd's orders of one market, and check the rows of its players (``table``)."""
    row = table[0].row
    replies = {one.row.agent_id: one.play.replies for one in table}
    seats = players or (row.agent_id,)
    if lacking := [name for name in seats if name not in replies]:
        raise ReplayError(
            f"{_name(row)}: its market was shared with {', '.join(lacking)}, whose rows are missing"
        )
    if len(table) > len(replies):
        raise ReplayError(
            f"{_name(row)}: {len(table)} trajectories of {len(players)} players: several fleets"
            " used this scenario id, and no record tells their rows apart"
        )
    if others := sorted(replies.keys() - set(seats)):
        raise ReplayError(f"{_name(row)}: {', '.join(others)} played, but did not join its market")
    try:  # the rules may name opponents that this version does not know, or a player twice
        market = make_market(scenario)
        for name in seats:
            market.join(name)
    except ValueError as error:
        raise ReplayError(f"{_name(row)}: {error}") from error
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
            f"{_name(row)}: {when} its balance is ${recorded:.2f}, but its recorded decisions lead"
            f" to ${own:.2f}: {_REMEDY}"
        )


def _catch_up(market: Market, row: RecordedRow, seen: SeenTick) -> NoiseOrder | None:
    """Find the crowd's order that leads to the reserves the agent saw, and carry it out."""
    pools = market.predictions.pools
    if [*pools] != [pool.market_id for pool in seen.pools]:
        raise ReplayError(
            f"{_name(row)}: in tick {seen.tick} the markets {', '.join(pools)} should be open, but"
            f" {', '.join(pool.market_id for pool in seen.pools)} are recorded"
        )
    orders = []
    for pool in seen.pools:
        if min(pool.yes, pool.no) <= 0:
            raise ReplayError(
                f"{_name(row)}: in tick {seen.tick} the reserves of {pool.market_id} are"
                f" {pool.yes:g}/{pool.no:g}: {_REMEDY}"
            )
        own = pools[pool.market_id]
        bought_yes, bought_no = pool.no - own.no, pool.yes - own.yes
        side = Side.YES if bought_yes > 0 else Side.NO
        dollars = max(bought_yes, bought_no)
        if abs(dollars) > _TOLERANCE:
            orders.append(NoiseOrder(pool.market_id, side, dollars))
    if len(orders) > 1:
        raise ReplayError(
            f"{_name(row)}: in tick {seen.tick} the prices of"
            f" {', '.join(order.market_id for order in orders)} do not follow from the recorded"
            f" decisions: {_REMEDY}"
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
                f" {pool.yes:g}/{pool.no:g}: no order leads there from {own.yes:g}/{own.no:g}"
            )


def _name(row: RecordedRow) -> str:
    return f"trajectory {row.trajectory_id} of scenario {row.scenario_id}"
