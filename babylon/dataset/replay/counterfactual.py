"""Counterfactual play: an agent in the place of a recorded one, many scenarios in lock-step.

The crowd repeats its orders. In a shared market the other agents repeat their decisions. The
agent's own orders move the prices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from babylon.core.errors import ReplayError
from babylon.evaluation.arena.play import Decide, is_malformed
from babylon.evaluation.rebuild.recorded import Prices, RecordedPlay, RecordedScenario
from babylon.game.market.game import make_market
from babylon.game.market.market import Seat
from babylon.game.market.orders import Decision, parse_decision


@dataclass(frozen=True, slots=True)
class _Place:
    """A seat in a rebuilt market, and the recorded play it replaces."""

    seat: Seat
    play: RecordedPlay
    players: tuple[tuple[str, RecordedPlay], ...]  # all players of the market, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A replayed scenario's result; P&L in USD, ``malformed`` as a share of the decisions."""

    window_id: str
    scenario_id: str
    agent_id: str
    trajectory_id: str
    prices: Prices
    recorded_pnl: float
    replayed_pnl: float
    malformed: float

    @property
    def difference(self) -> float:
        return self.replayed_pnl - self.recorded_pnl


def replay(
    recorded: Sequence[RecordedScenario], agent_id: str, decide: Decide | None = None
) -> list[Replayed]:
    """Play every scenario in which ``agent_id`` was recorded, in its place.

    Without ``decide``, the agent repeats its recorded decisions.

    Raises:
        ReplayError: The agent was not recorded, or the ticks of its replies are unknown.
    """
    found = [(one, play) for one in recorded for play in one.plays if play.agent_id == agent_id]
    if not found:
        agents = sorted({play.agent_id for one in recorded for play in one.plays})
        raise ReplayError(
            f"agent {agent_id!r} was not recorded in these {len(recorded)} scenarios; recorded"
            f" agents: {', '.join(agents[:20]) or 'none'}{', …' if len(agents) > 20 else ''}"
        )
    for _, play in found if decide is None else ():
        _require_replies(play)
    places = [_sit_down(one, play) for one, play in found]
    malformed = [0] * len(places)
    # In lock-step, so that a model answers all scenarios as one batch.
    while live := [index for index, place in enumerate(places) if not place.seat.over]:
        sitting = [places[index] for index in live]
        decisions = decide([place.seat for place in sitting]) if decide else _as_recorded(sitting)
        for index, decision in zip(live, decisions, strict=True):
            malformed[index] += is_malformed(decision)
            _step(places[index], decision)
    return [
        _result(one, place, bad)
        for (one, _), place, bad in zip(found, places, malformed, strict=True)
    ]


def _require_replies(play: RecordedPlay) -> None:
    if not play.replies:
        raise ReplayError(
            f"trajectory {play.trajectory_id}: the dataset does not hold the times of its replies:"
            " replay it from the database, or choose another --policy than recorded"
        )


def _sit_down(recorded: RecordedScenario, play: RecordedPlay) -> _Place:
    market = make_market(recorded.scenario)
    plays = {one.agent_id: one for one in recorded.plays}
    seats = {name: market.join(name) for name in recorded.players or (play.agent_id,)}
    others = tuple((name, play if name == play.agent_id else plays[name]) for name in seats)
    return _Place(seats[play.agent_id], play, others)


def _step(place: _Place, decision: Decision) -> None:
    tick = place.seat.tick
    place.seat.market.step(
        {
            name: decision if play is place.play else _again(play, tick)
            for name, play in place.players
        }
    )


def _as_recorded(places: Sequence[_Place]) -> list[Decision]:
    return [_again(place.play, place.seat.tick) for place in places]


def _again(play: RecordedPlay, tick: int) -> Decision:
    return parse_decision(play.replies[tick])


def _result(recorded: RecordedScenario, place: _Place, malformed: int) -> Replayed:
    seat, play = place.seat, place.play
    seat.market.settle()
    return Replayed(
        window_id=recorded.window_id,
        scenario_id=recorded.scenario.scenario_id,
        agent_id=play.agent_id,
        trajectory_id=play.trajectory_id,
        prices=recorded.prices,
        recorded_pnl=play.pnl_usd,
        replayed_pnl=seat.pnl,
        malformed=malformed / seat.scenario.rules.ticks,
    )
