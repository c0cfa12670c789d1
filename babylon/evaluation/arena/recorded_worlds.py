"""The gate's worlds by default: what the fleet plays, rebuilt from its windows, and more like them.

Worlds of recent windows come first, the newest window first. Bets on a window have half the weight
of those on the fourth window after it. Only worlds with the rules and the number of players of most
plays of the newest window are played: otherwise the fleet plays no more. Then come fresh worlds of
that kind, as long as the rows show that the simulator is the game. The window that the challenger
was trained on gives its rules, and no world that began in its time, whatever window of another
length that belongs to as well.

Rows without the market's state (``environmentState.market``), as those of the live game, give no
worlds: after another action, the game's next prompt is unknown. Without any row, nothing shows what
the fleet plays.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from babylon.core.settings import EvaluationSettings
from babylon.core.windows import GAME_MINUTES, Window, parse_window_id
from babylon.evaluation.arena.suite import unseen_scenarios
from babylon.evaluation.arena.worlds import BATCH, GateWorlds, WorldBatch, simulated
from babylon.evaluation.rebuild.recorded import RecordedScenario
from babylon.evaluation.rebuild.recorded_windows import played_rows, rebuild_rows
from babylon.game.market.scenario import PRESETS, Rules, Scenario
from babylon.store.connection import Store
from babylon.store.windows import list_windows

WINDOWS = 24  # most recent ones that are read
ROWS = 256  # of a window, at most
HALF_LIFE = 4  # windows
SHARE = 0.25  # of the budget: most worlds that are recorded ones
LEAST = 32  # worlds of a batch, so that a model answers many at once
LEAST_SHARED = 256  # worlds of a gate in shared markets, which have many seats each
log = logging.getLogger(__name__)


async def gate_worlds(
    store: Store, window_id: str, seed: str, evaluation: EvaluationSettings
) -> GateWorlds | None:
    """Return the worlds of the gate of a window; None if the rows do not tell how to make any."""
    budget = evaluation.scenarios
    if evaluation.rules != "fleet":
        return simulated(await _fresh(seed, budget, PRESETS[evaluation.rules]))
    recorded = await _recorded(store, window_id, enough=int(budget * SHARE))
    if not recorded:
        return None
    newest = _usual([one for one in recorded if one.window_id == recorded[0].window_id])
    _, seats = _kind(newest)
    budget = max(LEAST_SHARED, budget // seats) if seats > 1 else budget
    own = _played(window_id)
    usable = [one for one in recorded if one.window_id != own and _kind(one) == _kind(newest)]
    batches = _batches(usable, int(budget * SHARE))
    rest = budget - sum(len(batch.scenarios) for batch in batches)
    try:
        fresh = simulated(await _fresh(seed, rest, newest.scenario.rules))
    except ValueError as error:  # another version of the game wrote the rows
        log.warning("window %s: no world of its rules can be made: %s", newest.window_id, error)
        return None
    return GateWorlds(batches=(*batches, *fresh.batches), seats=seats)


def _usual(played: Sequence[RecordedScenario]) -> RecordedScenario:
    """Return a world of the kind that most plays had, and as long as a whole round of it.

    One agent's rows must not choose for all. The last round of a window may be cut short, and may
    even have more plays, if rows of a whole round are lost: of all lengths that at least half as
    many plays had as the commonest, the longest counts.
    """
    kinds, lengths = Counter[tuple[Rules, int]](), Counter[int]()
    for one in played:
        kinds[_kind(one)] += len(one.plays)
    # Of two equally common ones that of more players: its gate tests the crowd besides.
    most = max(kinds, key=lambda kind: (kinds[kind], kind[1]))
    usual = [one for one in played if _kind(one) == most]
    for one in usual:
        lengths[one.scenario.rules.ticks] += len(one.plays)
    enough = max(lengths.values()) / 2
    longest = max(ticks for ticks, plays in lengths.items() if plays >= enough)
    return next(one for one in usual if one.scenario.rules.ticks == longest)


def _kind(one: RecordedScenario) -> tuple[Rules, int]:
    """Return a world's rules but for its length, and the number of players in its market."""
    return replace(one.scenario.rules, ticks=0), max(1, len(one.players))


async def _fresh(seed: str, count: int, rules: Rules) -> list[Scenario]:
    return await asyncio.to_thread(unseen_scenarios, "gate", seed, count, rules)


async def _recorded(store: Store, window_id: str, enough: int) -> list[RecordedScenario]:
    """Return the fleet's scenarios of recent windows, newest first; none if the newest has none."""
    found: list[RecordedScenario] = []
    if store.game_problem:
        return found
    own, recent = await _windows(store, window_id)
    read = [own]  # no row is read twice
    for window in recent[:WINDOWS]:
        apart_from = [one for one in read if one != window]
        rows = await played_rows(store, window, apart_from=apart_from, most=ROWS)
        if not rows:
            continue
        read.append(window)
        rebuilt = await asyncio.to_thread(rebuild_rows, rows)
        exact = [one for one in rebuilt.scenarios if one.prices == "exact"]
        if not exact and not found:
            log.warning("window %s: no world can be rebuilt from its rows", window.id)
            break
        found += [replace(one, window_id=window.id) for one in exact]
        if sum(one.window_id != own.id for one in found) >= enough:
            break
    return found


async def _windows(store: Store, window_id: str) -> tuple[Window, list[Window]]:
    """Return (the window that was played, all windows with it, newest first)."""
    rows = {row.window_id: row.minutes for row in await list_windows(store)}
    windows = {_played(name): parse_window_id(_played(name), rows[name]) for name in rows}
    own = parse_window_id(_played(window_id), rows.get(window_id, GAME_MINUTES))
    windows[own.id] = own
    return own, sorted(windows.values(), key=attrgetter("start"), reverse=True)


def _played(window_id: str) -> str:
    """Return the window that was played: a recipe trains on the rows of another window."""
    return window_id.partition("+")[0]


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
