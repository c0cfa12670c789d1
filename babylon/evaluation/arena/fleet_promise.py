"""The promise of a champion: that the fleet earns more than with another policy that is known.

The gate promised that from worlds of its own. This check asks the fleet's own play. Each world of a
window that the champion played alone is rebuilt from its rows, and a rival plays it too: the policy
before the champion, or the base model. The paired difference is the fleet's mean P&L in that world
minus the rival's:

    d_w = mean over agents of pnl(fleet, w) - pnl(rival, w)

Gamblers bet on its loss (``babylon.evaluation.arena.betting``). One begins with every window, so
that good months do not hide a market that turned: the k-th has 1 / (k (k + 1)) of the capital, and
the part of those to come is kept. Together they are one supermartingale, valid at all windows. Once
they have 40 times their capital, the fleet surely earns less than with the rival (at 97.5 %), and
the rival takes over. Only gamblers of the last ``MOST`` windows are asked: leaving out the others
can only lower the wealth, and the work would grow with the square of the windows.

Worlds that agents share, and play without the market's state (the live game's), give no pairs.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

import numpy as np

from babylon.evaluation.arena.betting import CERTAIN, Differences, log_wealth, sequence
from babylon.evaluation.arena.confidence import Interval
from babylon.evaluation.arena.play import Decide, play
from babylon.evaluation.arena.worlds import simulated
from babylon.evaluation.rebuild.recorded import RecordedScenario
from babylon.store.fleet_pairs import FleetPair

BUDGET = 1024  # worlds for which the bets are best
MOST = 720  # windows: a month of hours


def own_worlds(
    scenarios: Sequence[RecordedScenario],
    players: Mapping[str, Collection[int | None]],
    champion: int,
) -> list[RecordedScenario]:
    """Return the worlds that the champion alone played, each agent by itself.

    Args:
        players: trajectory id → the policies that answered its calls.
    """
    # In a shared market others moved the prices: replayed alone, the world would be another one.
    return [
        one
        for one in scenarios
        if one.prices == "exact"
        and not one.players
        and one.plays
        and all({*players.get(each.trajectory_id, ())} == {champion} for each in one.plays)
    ]


def pairs_of(own: Sequence[RecordedScenario], rival: Decide) -> list[FleetPair]:
    """Return a pair for each world, in which the rival plays. Blocking."""
    worlds = simulated([one.scenario for one in own])
    before = play(rival, worlds.scenarios)
    return [
        FleetPair(
            scenario_id=one.scenario.scenario_id,
            fleet_usd=min(fmean(each.pnl_usd for each in one.plays), float(credit)),
            before_usd=min(float(pnl), float(credit)),
            room_usd=float(room),
        )
        for one, pnl, credit, room in zip(own, before.pnl, worlds.credit, worlds.room, strict=True)
    ]


def broken_promise(windows: Sequence[Sequence[FleetPair]], rivals: int = 1) -> Interval | None:
    """Return the difference with its 95 % sequence if the fleet surely loses, else None. Blocking.

    The difference is that since the window in which the loss shows most.

    Args:
        windows: pairs of the windows since the champion serves, the oldest first.
        rivals: policies with which the champion is compared; they share the error.
    """
    oldest = max(0, len(windows) - MOST)
    recent = windows[oldest:]
    pairs = [pair for window in recent for pair in window]
    room = np.array([pair.room_usd for pair in pairs])
    gains = np.array([pair.fleet_usd - pair.before_usd for pair in pairs])
    wealth: dict[int, float] = {}  # number of the first pair → log wealth
    begin = 0
    for number, window in enumerate(recent, oldest):
        if window:
            lost = Differences(-gains[begin:], room[begin:], room[begin:])
            share = 1 / ((number + 1) * (number + 2))
            wealth[begin] = math.log(share) + float(log_wealth(lost, BUDGET)[-1])
        begin += len(window)
    kept = -math.log(len(windows) + 1)
    if not wealth or np.logaddexp.reduce([kept, *wealth.values()]) < CERTAIN + math.log(rivals):
        return None
    begin = max(wealth, key=wealth.__getitem__)
    return sequence(Differences(gains[begin:], room[begin:], room[begin:]), BUDGET)
