"""Matches and leaderboards as ``babylon arena`` prints them.

The commands import this module when they run, because the arena is slow to load.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.text import Text

from babylon.cli.output import print_table
from babylon.core.errors import ArenaError
from babylon.core.home import Home
from babylon.evaluation.arena.confidence import Interval, paired_difference
from babylon.evaluation.arena.leaderboard import (
    CheckedSuite,
    PlayerStarted,
    Standing,
    all_players,
    check_suite,
    leaderboard,
    player_result,
)
from babylon.evaluation.arena.match_page import write_report
from babylon.evaluation.arena.play import PlayerResult
from babylon.evaluation.arena.players import SCRIPTED, all_yardsticks, find_player
from babylon.evaluation.arena.suite import find_suite
from babylon.store import Store


async def compare(
    store: Store, home: Home, seed: int, suite: str, players: tuple[str, str], model: str
) -> tuple[CheckedSuite, dict[str, PlayerResult], Interval, str]:
    """Let two players play a suite.

    Returns:
        The suite, the results by name, second minus first in P&L, and the report's directory.

    Raises:
        ArenaError: both names are the same player.
    """
    found = [await find_player(store, text, seed) for text in players]
    names = [player.name for player in found]
    if names[0] == names[1]:
        raise ArenaError(f"{names[0]} cannot be compared with itself: name two players")
    checked = await check_suite(store, find_suite(suite))
    results = {p.name: await player_result(store, checked, p, seed, model) for p in found}
    first, second = results.values()
    difference = paired_difference(first.pnl, second.pnl)
    directory = home.arena / re.sub(r"[^\w@.-]+", "-", f"{checked.suite}-{'-vs-'.join(names)}")
    others = await asyncio.to_thread(all_yardsticks, home, checked.worlds)
    shown = results | {n: r for n, r in others.items() if f"{SCRIPTED}{n}" not in results}
    record = suite_record(checked) | {"difference": asdict(difference)}
    await asyncio.to_thread(write_report, directory, shown, (), record)
    return checked, results, difference, str(directory)


async def rank(
    store: Store,
    suite: str,
    seed: int,
    model: str,
    entered: PlayerStarted,
    more: Sequence[str] = (),
) -> tuple[CheckedSuite, list[Standing]]:
    """Let every player and those of ``more`` play a suite; ``entered`` reports progress."""
    checked = await check_suite(store, find_suite(suite))
    named = [await find_player(store, text, seed) for text in more]
    players = named + await all_players(store, seed, checked.suite.rules)
    return checked, await leaderboard(store, checked, players, seed, model, entered)


def print_results(checked: CheckedSuite, results: Mapping[str, PlayerResult | None]) -> None:
    """Print a table of the players' results. A player without a result has a row of dashes."""
    title = f"Suite {checked.suite}, {len(checked.worlds)} scenarios, digest {checked.digest[:16]}"
    rows = [[name, *(_cells(result) if result else [None] * 5)] for name, result in results.items()]
    columns = ["player", "mean P&L, $", "95 % interval", "win rate", "drawdown, $", "malformed"]
    print_table(title, columns, rows)


def _cells(result: PlayerResult) -> list[Text]:
    """Return the figures as ``Text``, which aligns to the right."""
    mean = result.mean_pnl
    cells = [
        f"{mean.mean:+.1f}",
        f"{mean.low:+.1f} to {mean.high:+.1f}",
        f"{result.win_rate:.1%}",
        f"{result.drawdown:.1f}",
        f"{result.malformed:.1%}",
    ]
    return [Text(cell) for cell in cells]


def figures(result: PlayerResult) -> dict[str, float]:
    """Return the figures of a result for JSON."""
    mean = result.mean_pnl
    return {
        "pnl": mean.mean,
        "pnl_low": mean.low,
        "pnl_high": mean.high,
        "win_rate": result.win_rate,
        "drawdown": result.drawdown,
        "malformed": result.malformed,
    }


def standing_record(one: Standing) -> dict[str, object]:
    """Return a row of the leaderboard for JSON."""
    if one.result:
        return {"player": one.player, **figures(one.result)}
    return {"player": one.player, "problem": one.problem}


def suite_record(checked: CheckedSuite) -> dict[str, object]:
    """Return the suite for JSON."""
    return {
        "suite": str(checked.suite),
        "suite_digest": checked.digest,
        "scenarios": len(checked.worlds),
    }
