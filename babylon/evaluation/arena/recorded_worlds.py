"""The gate's worlds by default: what the fleet plays, rebuilt from its windows, and more like them.

Worlds of recent windows come first, the newest window first. Bets on a window have half the weight
of those on the fourth window after it. Only worlds with the newest window's rules are played: under
other rules the fleet plays no more. Then come fresh worlds of those rules, as long as the rows show
that the simulator is the game. The window that the challenger was trained on gives its rules, and
none of its worlds.

Rows without the market's state (``environmentState.market``), as those of the live game, give no
worlds: after another action, the game's next prompt is unknown. Without any row, fresh worlds of
the demo's game are played.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from babylon.core.settings import EvaluationSettings
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.evaluation.arena.worlds import BATCH, GateWorlds, WorldBatch, simulated
from babylon.evaluation.rebuild.recorded import RecordedScenario
from babylon.evaluation.rebuild.recorded_windows import rebuild_rows, recorded_rows
from babylon.game.market.scenario import PRESETS, STARTER, Rules, Scenario
from babylon.store.connection import Store
from babylon.store.windows import list_windows

WINDOWS = 24  # most recent ones that are read
ROWS = 256  # of a window, at most
HALF_LIFE = 4  # windows
SHARE = 0.25  # of the budget: most worlds that are recorded ones
LEAST = 32  # worlds of a batch, so that a model answers many at once
LEAST_SHARED = 256  # worlds of a gate in shared markets, which have many seats each
log = logging.getLogger(__name__)
Known = Literal["fleet", "live", "nothing"]


async def gate_worlds(
    store: Store, window_id: str, seed: str, evaluation: EvaluationSettings
) -> GateWorlds | None:
    """Return the worlds of the gate of a window; None if no row tells how to make any."""
    budget = evaluation.scenarios
    if evaluation.rules != "fleet":
        return simulated(await _fresh(seed, budget, PRESETS[evaluation.rules]))
    window_id = _played(window_id)
    known, recorded = await _recorded(store, window_id, enough=int(budget * SHARE))
    if known == "live":
        return None
    if not recorded:
        return simulated(await _fresh(seed, budget, STARTER))
    # The last round of a window may be cut short by its end.
    last = [one for one in recorded if one.window_id == recorded[0].window_id]
    newest = max(last, key=lambda one: one.scenario.rules.ticks)
    seats = max(1, len(newest.players))
    budget = max(LEAST_SHARED, budget // seats) if seats > 1 else budget
    usable = [
        one
        for one in recorded
        if one.window_id != window_id and _alike(one, newest) and max(1, len(one.players)) == seats
    ]
    batches = _batches(usable, int(budget * SHARE))
    rest = budget - sum(len(batch.scenarios) for batch in batches)
    fresh = simulated(await _fresh(seed, rest, newest.scenario.rules))
    return GateWorlds(batches=(*batches, *fresh.batches), seats=seats)


async def _fresh(seed: str, count: int, rules: Rules) -> list[Scenario]:
    return await asyncio.to_thread(unseen_scenarios, "gate", seed, count, rules)


async def _recorded(
    store: Store, window_id: str, enough: int
) -> tuple[Known, list[RecordedScenario]]:
    """Return (source of the rows, the fleet's scenarios of recent windows, newest first)."""
    if store.game_problem:
        return "nothing", []
    known: Known = "nothing"
    found: list[RecordedScenario] = []
    ids = {_played(row.window_id) for row in await list_windows(store)} | {window_id}
    for recent in sorted(ids, reverse=True)[:WINDOWS]:
        rows = await recorded_rows(store, recent, most=ROWS)
        if not rows:
            continue
        rebuilt = await asyncio.to_thread(rebuild_rows, rows)
        exact = [one for one in rebuilt.scenarios if one.prices == "exact"]
        if known == "nothing":  # the newest window decides
            known = "fleet" if exact else "live"
        found += exact
        if known == "live":
            log.warning("window %s: no world can be rebuilt from its rows", recent)
        if known == "live" or sum(one.window_id != window_id for one in found) >= enough:
            break
    return known, found


def _played(window_id: str) -> str:
    """Return the window that was played: a recipe trains on the rows of another window."""
    return window_id.partition("+")[0]


def _alike(one: RecordedScenario, newest: RecordedScenario) -> bool:
    """Return whether two worlds have the same rules but for their length."""
    return replace(one.scenario.rules, ticks=0) == replace(newest.scenario.rules, ticks=0)


def _batches(recorded: Sequence[RecordedScenario], most: int) -> list[WorldBatch]:
    """Return at most ``most`` worlds in batches of whole windows, newest first."""
    batches: list[WorldBatch] = []
    windows = list(dict.fromkeys(one.window_id for one in recorded))
    waiting: list[Scenario] = []
    first = 0  # age of the newest window that waits
    for age, name in enumerate(windows):
        waiting += [_named(one, name) for one in recorded if one.window_id == name]
        if len(waiting) >= LEAST or age + 1 == len(windows):
            room = most - sum(len(batch.scenarios) for batch in batches)
            part = tuple(waiting[: min(room, BATCH)])
            if not part:
                break
            weight = 0.5 ** (first / HALF_LIFE)
            batches.append(WorldBatch(scenarios=part, source="recorded", weight=weight))
            waiting, first = [], age + 1
    return batches


def _named(recorded: RecordedScenario, window_id: str) -> Scenario:
    """Return the scenario under an id of its window: ids seed the replies' random numbers."""
    scenario = recorded.scenario
    return replace(scenario, scenario_id=f"gate:{window_id}:{scenario.scenario_id}")
