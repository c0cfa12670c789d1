"""The value of a reply in the simulator: the agent's P&L had it given this reply instead.

The recorded market is rebuilt to the cent, its crowd repeats its orders, and the agent's and all
other recorded decisions stay as they were. So two replies to a prompt differ in that decision alone
(decision 52), and in the worlds that it leads to.

A malformed reply or refused action is worth ``FAILURE_USD`` less than the worst of the prompt's
other replies, as in the default scorer. It holds, so otherwise it would be worth more than every
losing trade, and pairs would teach it (decision 97).
"""

from collections.abc import Sequence

from babylon.evaluation.preferences.choose import DecisionPoint
from babylon.evaluation.rebuild.recorded import RecordedPlay, RecordedScenario
from babylon.game.market.game import make_market
from babylon.game.market.orders import Decision, parse_decision
from babylon.scoring.rewards.heuristic import FAILURE_USD


def value_replies(
    recorded: Sequence[RecordedScenario],
    points: Sequence[DecisionPoint],
    replies: Sequence[Sequence[str]],
) -> list[list[float] | None]:
    """Return the P&L in dollars of each reply of each decision, or what a failure is worth.

    None for a decision that cannot be played again: its scenario was not rebuilt exactly, or its
    call is not the one that the agent acted by.
    """
    places = {
        play.trajectory_id: (one, play)
        for one in recorded
        if one.prices == "exact"
        for play in one.plays
    }
    values: list[list[float] | None] = []
    for point, texts in zip(points, replies, strict=True):
        scenario, play = places.get(point.trajectory_id, (None, None))
        if scenario is None or play is None or not _acted_by(play, point):
            values.append(None)
            continue
        decisions = [parse_decision(text) for text in texts]
        decided = {  # many texts are the same decision
            decision: _outcome(scenario, play, point.call.step, decision)
            for decision in dict.fromkeys(decisions)
        }
        failed = min((pnl for pnl, _ in decided.values()), default=0.0) - FAILURE_USD
        worths = {decision: pnl if done else failed for decision, (pnl, done) in decided.items()}
        values.append([worths[decision] for decision in decisions])
    return values


def _acted_by(play: RecordedPlay, point: DecisionPoint) -> bool:
    step = point.call.step
    return step < len(play.replies) and play.replies[step] == point.call.response


def _outcome(
    recorded: RecordedScenario, play: RecordedPlay, tick: int, decision: Decision
) -> tuple[float, bool]:
    """Return the agent's P&L in dollars, and whether its decision was carried out."""
    market = make_market(recorded.scenario)
    plays = {one.agent_id: one for one in recorded.plays}
    seats = {name: market.join(name) for name in recorded.players or (play.agent_id,)}
    while not market.over:
        decisions = {}
        for name in seats:
            own = play if name == play.agent_id else plays[name]
            at_hand = own is play and market.tick == tick
            decisions[name] = decision if at_hand else parse_decision(own.replies[market.tick])
        market.step(decisions)
    market.settle()
    seat = seats[play.agent_id]
    return seat.pnl, seat.outcomes[tick].success
