"""``babylon arena``: two players against each other, or all players in order."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.progress import Progress

from babylon.cli.options import Json
from babylon.cli.output import print_json, stderr, with_store
from babylon.core.settings_loading import load_settings

app = typer.Typer(help="Policies and scripted agents on the same worlds.", no_args_is_help=True)
PlayerName = Annotated[
    str, typer.Option(metavar="PLAYER", help="Policy version, path or scripted:NAME.")
]
SuiteName = Annotated[str, typer.Option("--suite", metavar="NAME", help="Frozen set of worlds.")]


@app.command()
def play(a: PlayerName, b: PlayerName, suite: SuiteName = "starter", json: Json = False) -> None:
    """Compare two players on a frozen suite."""
    from babylon.cli import arena_page as page

    settings = load_settings()
    checked, results, difference, directory = with_store(
        settings, page.compare, settings.home, settings.seed, suite, (a, b), settings.model.name
    )
    if json:
        print_json(
            {
                **page.suite_record(checked),
                "players": [{"player": name} | page.figures(r) for name, r in results.items()],
                "difference": asdict(difference),
                "report": directory,
            }
        )
        return
    page.print_results(checked, results)
    first, second = results
    print(f"{second} minus {first}: {difference} $ per scenario (paired, 95 %)")
    print(f"report with pictures: {directory}")


@app.command()
def leaderboard(
    suite: SuiteName = "starter",
    player: Annotated[
        list[str] | None, typer.Option(metavar="PLAYER", help="One more player; repeatable.")
    ] = None,
    json: Json = False,
) -> None:
    """Rank all registered checkpoints, numeric baselines and scripted agents, best first."""
    from babylon.cli import arena_page as page

    settings = load_settings()
    with Progress(console=stderr, disable=not stderr.is_terminal) as progress:
        bar = progress.add_task("players", total=None)

        def entered(name: str, done: int, total: int) -> None:
            progress.update(bar, description=name, completed=done, total=total)

        checked, standings = with_store(
            settings, page.rank, suite, settings.seed, settings.model.name, entered, player or ()
        )
    if json:
        records = [page.standing_record(one) for one in standings]
        print_json({**page.suite_record(checked), "standings": records})
    else:
        page.print_results(checked, {s.player: s.result for s in standings})
    problems = [f"{s.player}: {s.problem}" for s in standings if s.problem]
    for problem in problems:
        typer.echo(problem, err=True)
    if problems:
        raise typer.Exit(1)
