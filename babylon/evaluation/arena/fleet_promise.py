"""The promise of a champion: that the fleet earns more than with the policy before it.

The gate promised that from worlds of its own. This check asks the fleet's own play. Each world of a
window that the champion played alone is rebuilt from its rows, and the policy before it plays the
same world. The paired difference is the fleet's mean P&L in that world minus the predecessor's:

    d_w = mean over agents of pnl(fleet, w) - pnl(predecessor, w)

Betting on its loss (``babylon.evaluation.arena.betting``) is valid at all windows together. Once it
has earned 40 times its capital, the fleet surely earns less than with the predecessor (at 97.5 %),
and the predecessor returns.

Worlds that agents share, and play without the market's state (the live game's), give no pairs.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from babylon.core.trajectories import Trajectory
from babylon.evaluation.arena.betting import CERTAIN, Differences, log_wealth, sequence
from babylon.evaluation.arena.confidence import Interval
from babylon.evaluation.arena.play import Decide, play
from babylon.evaluation.arena.worlds import simulated
from babylon.evaluation.rebuild.recorded import RecordedScenario
from babylon.store.fleet_pairs import FleetPair

BUDGET = 1024  # worlds for which the bets are best


def own_worlds(
    scenarios: Sequence[RecordedScenario], played: Mapping[str, Trajectory], champion: int
) -> list[RecordedScenario]:
    """Return the worlds that the champion alone played, each agent by itself.

    Args:
        played: trajectory id → the trajectory, whose calls name their policy.
    """
    # In a shared market others moved the prices: replayed alone, the world would be another one.
    return [
        one
        for one in scenarios
        if one.prices == "exact"
        and not one.players
        and one.plays
        and all(_by(played.get(each.trajectory_id), champion) for each in one.plays)
    ]


def pairs_of(own: Sequence[RecordedScenario], predecessor: Decide) -> list[FleetPair]:
    """Return a pair for each world, in which the policy before plays. Blocking."""
    worlds = simulated([one.scenario for one in own])
    before = play(predecessor, worlds.scenarios)
    return [
        FleetPair(
            scenario_id=one.scenario.scenario_id,
            fleet_usd=min(fmean(each.pnl_usd for each in one.plays), float(credit)),
            before_usd=min(float(pnl), float(credit)),
            room_usd=float(room),
        )
        for one, pnl, credit, room in zip(own, before.pnl, worlds.credit, worlds.room, strict=True)
    ]


def _by(trajectory: Trajectory | None, policy: int) -> bool:
    return trajectory is not None and {c.policy_version for c in trajectory.calls} == {policy}


def broken_promise(pairs: Sequence[FleetPair]) -> Interval | None:
    """Return the difference with its 95 % sequence if the fleet surely loses, else None."""
    if not pairs:
        return None
    room = np.array([pair.room_usd for pair in pairs])
    lost = Differences(np.array([pair.fleet_usd - pair.before_usd for pair in pairs]), room, room)
    if log_wealth(lost.reversed, BUDGET)[-1] < CERTAIN:
        return None
    return sequence(lost, BUDGET)
