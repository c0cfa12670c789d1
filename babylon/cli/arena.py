"""``babylon arena``: two players against each other, or all players in order."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.progress import Progress

from babylon.cli.options import Json
from babylon.cli.output import print_json, print_table, stderr
from babylon.cli.shared import with_store
from babylon.core.settings import load_settings

app = typer.Typer(help="Policies and scripted agents on the same worlds.", no_args_is_help=True)
PlayerName = Annotated[
    str, typer.Option(metavar="PLAYER", help="Policy version, checkpoint path or scripted:NAME.")
]
SuiteName = Annotated[str, typer.Option("--suite", metavar="NAME", help="Frozen set of worlds.")]


@app.command()
def play(a: PlayerName, b: PlayerName, suite: SuiteName = "starter", json: Json = False) -> None:
    """Compare two players on a frozen suite."""
    from babylon.cli.arena_page import COLUMNS, compare, figures, result_row, suite_record, title

    settings = load_settings()
    checked, results, difference, directory = with_store(
        settings, compare, settings.home, settings.seed, suite, (a, b)
    )
    if json:
        print_json(
            {
                **suite_record(checked),
                "players": [{"player": name} | figures(r) for name, r in results.items()],
                "difference": asdict(difference),
                "report": directory,
            }
        )
        return
    print_table(title(checked), COLUMNS, [[name, *result_row(r)] for name, r in results.items()])
    first, second = results
    print(f"{second} minus {first}: {difference} $ per scenario (paired, 95 %)")
    print(f"report with pictures: {directory}")


@app.command()
def leaderboard(suite: SuiteName = "starter", json: Json = False) -> None:
    """Rank all registered checkpoints and all scripted agents, best first."""
    from babylon.cli.arena_page import (
        COLUMNS,
        rank,
        result_row,
        standing_record,
        suite_record,
        title,
    )

    settings = load_settings()
    with Progress(console=stderr, disable=not stderr.is_terminal) as progress:
        bar = progress.add_task("players", total=None)

        def entered(name: str, done: int, total: int) -> None:
            progress.update(bar, description=name, completed=done, total=total)

        checked, standings = with_store(settings, rank, suite, settings.seed, entered)
    if json:
        records = [standing_record(one) for one in standings]
        print_json({**suite_record(checked), "standings": records})
    else:
        rows = [[s.player, *(result_row(s.result) if s.result else [None] * 5)] for s in standings]
        print_table(title(checked), COLUMNS, rows)
    problems = [f"{s.player}: {s.problem}" for s in standings if s.problem]
    for problem in problems:
        typer.echo(problem, err=True)
    if problems:
        raise typer.Exit(1)
