"""``babylon arena``: two players against each other, or all of them in order."""

import asyncio
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress
from rich.text import Text

from babylon.cli.options import Json
from babylon.cli.output import print_json, print_table, stderr
from babylon.core.errors import ArenaError
from babylon.core.settings import Settings, load_settings

if TYPE_CHECKING:
    from babylon.evaluation.arena.confidence import Interval
    from babylon.evaluation.arena.leaderboard import Entered, Standing, Venue
    from babylon.evaluation.arena.player_result import Result

app = typer.Typer(help="Policies and scripted agents on the same worlds.", no_args_is_help=True)
Who = Annotated[
    str, typer.Option(metavar="WHO", help="Policy version, checkpoint path, or scripted:NAME.")
]
SuiteName = Annotated[str, typer.Option("--suite", metavar="NAME", help="Frozen set of worlds.")]


@app.command()
def play(a: Who, b: Who, suite: SuiteName = "starter", json: Json = False) -> None:
    """Compare two players on a frozen suite: is b better than a?"""
    settings = load_settings()
    venue, results, difference, directory = asyncio.run(_play(settings, suite, a, b))
    if json:
        print_json(
            {
                **_suite(venue),
                "players": [{"player": name} | _figures(r) for name, r in results.items()],
                "difference": asdict(difference),
                "report": directory,
            }
        )
        return
    print_table(_title(venue), _COLUMNS, [[name, *_row(r)] for name, r in results.items()])
    first, second = results
    print(f"{second} less {first}: {difference} $ a scenario (paired, 95 %)")
    print(f"pictures and every figure: {directory}")


@app.command()
def leaderboard(suite: SuiteName = "starter", json: Json = False) -> None:
    """All registered checkpoints and all scripted agents, best first."""
    settings = load_settings()
    with Progress(console=stderr, disable=not stderr.is_terminal) as progress:
        bar = progress.add_task("players", total=None)
        venue, standings = asyncio.run(
            _leaderboard(
                settings,
                suite,
                lambda name, done, total: progress.update(
                    bar, description=name, completed=done, total=total
                ),
            )
        )
    if json:
        print_json({**_suite(venue), "standings": [_standing(one) for one in standings]})
    else:
        rows = [[s.player, *(_row(s.result) if s.result else [None] * 5)] for s in standings]
        print_table(_title(venue), _COLUMNS, rows)
    problems = [f"{s.player}: {s.problem}" for s in standings if s.problem]
    for problem in problems:
        typer.echo(problem, err=True)
    if problems:
        raise typer.Exit(1)


async def _play(
    settings: Settings, suite: str, a: str, b: str
) -> "tuple[Venue, dict[str, Result], Interval, str]":
    from babylon.evaluation.arena.confidence import paired_difference
    from babylon.evaluation.arena.leaderboard import open_venue, played
    from babylon.evaluation.arena.match_page import write_report
    from babylon.evaluation.arena.player_result import yardsticks
    from babylon.evaluation.arena.players import SCRIPTED, find_player
    from babylon.evaluation.arena.suite import find_suite
    from babylon.store import open_store

    async with open_store(settings) as store:
        players = [await find_player(store, text, settings.seed) for text in (a, b)]
        names = [player.name for player in players]
        if names[0] == names[1]:
            raise ArenaError(f"{names[0]} against itself differs in nothing: name two players")
        venue = await open_venue(store, find_suite(suite))
        results = {p.name: await played(store, venue, p, settings.seed) for p in players}
    first, second = results.values()
    difference = paired_difference(first.pnl, second.pnl)
    directory = settings.home.arena / re.sub(
        r"[^\w@.-]+", "-", f"{venue.suite}-{'-vs-'.join(names)}"
    )
    scripted = yardsticks(venue.worlds)
    shown = results | {n: r for n, r in scripted.items() if f"{SCRIPTED}{n}" not in results}
    await asyncio.to_thread(
        write_report, directory, shown, (), _suite(venue) | {"difference": asdict(difference)}
    )
    return venue, results, difference, str(directory)


async def _leaderboard(
    settings: Settings, suite: str, entered: "Entered"
) -> "tuple[Venue, list[Standing]]":
    from babylon.evaluation.arena.leaderboard import everyone, leaderboard, open_venue
    from babylon.evaluation.arena.suite import find_suite
    from babylon.store import open_store

    async with open_store(settings) as store:
        venue = await open_venue(store, find_suite(suite))
        players = await everyone(store, settings.seed)
        return venue, await leaderboard(store, venue, players, settings.seed, entered)


_COLUMNS = ["player", "mean P&L, $", "95 % interval", "win rate", "drawdown, $", "malformed"]


def _row(result: "Result") -> list[Any]:
    mean = result.mean_pnl
    cells = [
        f"{mean.mean:+.1f}",
        f"{mean.low:+.1f} to {mean.high:+.1f}",
        f"{result.win_rate:.1%}",
        f"{result.drawdown:.1f}",
        f"{result.malformed:.1%}",
    ]
    return [Text(cell) for cell in cells]  # all to the right


def _figures(result: "Result") -> dict[str, float]:
    mean = result.mean_pnl
    return {
        "pnl": mean.mean,
        "pnl_low": mean.low,
        "pnl_high": mean.high,
        "win_rate": result.win_rate,
        "drawdown": result.drawdown,
        "malformed": result.malformed,
    }


def _standing(one: "Standing") -> dict[str, Any]:
    figures = _figures(one.result) if one.result else {"problem": one.problem}
    return {"player": one.player, **figures}


def _suite(venue: "Venue") -> dict[str, Any]:
    return {
        "suite": str(venue.suite),
        "suite_digest": venue.digest,
        "scenarios": len(venue.worlds),
    }


def _title(venue: "Venue") -> str:
    return f"Suite {venue.suite}, {len(venue.worlds)} scenarios, digest {venue.digest[:16]}"
