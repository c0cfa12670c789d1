"""Matches and leaderboards as ``babylon arena`` prints them.

The commands import this module when they run, because the arena is slow to load.
"""

import asyncio
import re
from dataclasses import asdict

from rich.text import Text

from babylon.core.errors import ArenaError
from babylon.core.home import Home
from babylon.evaluation.arena.confidence import Interval, paired_difference
from babylon.evaluation.arena.leaderboard import (
    Entered,
    Standing,
    Venue,
    everyone,
    leaderboard,
    open_venue,
    played,
)
from babylon.evaluation.arena.match_page import write_report
from babylon.evaluation.arena.player_result import Result, yardsticks
from babylon.evaluation.arena.players import SCRIPTED, find_player
from babylon.evaluation.arena.suite import find_suite
from babylon.store import Store

COLUMNS = ["player", "mean P&L, $", "95 % interval", "win rate", "drawdown, $", "malformed"]


async def compare(
    store: Store, home: Home, seed: int, suite: str, players: tuple[str, str]
) -> tuple[Venue, dict[str, Result], Interval, str]:
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
    venue = await open_venue(store, find_suite(suite))
    results = {p.name: await played(store, venue, p, seed) for p in found}
    first, second = results.values()
    difference = paired_difference(first.pnl, second.pnl)
    directory = home.arena / re.sub(r"[^\w@.-]+", "-", f"{venue.suite}-{'-vs-'.join(names)}")
    scripted = yardsticks(venue.worlds)
    shown = results | {n: r for n, r in scripted.items() if f"{SCRIPTED}{n}" not in results}
    record = suite_record(venue) | {"difference": asdict(difference)}
    await asyncio.to_thread(write_report, directory, shown, (), record)
    return venue, results, difference, str(directory)


async def rank(
    store: Store, suite: str, seed: int, entered: Entered
) -> tuple[Venue, list[Standing]]:
    """Let every player play a suite; ``entered`` reports progress."""
    venue = await open_venue(store, find_suite(suite))
    players = await everyone(store, seed)
    return venue, await leaderboard(store, venue, players, seed, entered)


def result_row(result: Result) -> list[Text]:
    """Return the cells of a result; as ``Text`` they align to the right."""
    mean = result.mean_pnl
    cells = [
        f"{mean.mean:+.1f}",
        f"{mean.low:+.1f} to {mean.high:+.1f}",
        f"{result.win_rate:.1%}",
        f"{result.drawdown:.1f}",
        f"{result.malformed:.1%}",
    ]
    return [Text(cell) for cell in cells]


def figures(result: Result) -> dict[str, float]:
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


def suite_record(venue: Venue) -> dict[str, object]:
    """Return the suite for JSON."""
    return {
        "suite": str(venue.suite),
        "suite_digest": venue.digest,
        "scenarios": len(venue.worlds),
    }


def title(venue: Venue) -> str:
    """Return the title of a table."""
    return f"Suite {venue.suite}, {len(venue.worlds)} scenarios, digest {venue.digest[:16]}"
