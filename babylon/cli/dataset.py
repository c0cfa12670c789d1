"""``babylon dataset``: finished windows as files and on the hub, and recorded windows replayed."""

import asyncio
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from babylon.cli.options import Json
from babylon.cli.output import print_json, print_table, show_values, with_store
from babylon.core.settings_loading import load_settings
from babylon.dataset.export_names import ExportTarget

if TYPE_CHECKING:
    from babylon.dataset.publish import PublishedDay

app = typer.Typer(
    help="Build, publish and export the dataset of finished windows, and replay recorded ones.",
    no_args_is_help=True,
)
Day = Annotated[
    datetime | None,
    typer.Option(
        formats=["%Y-%m-%d"], metavar="YYYY-MM-DD", help="Only the windows of this UTC day."
    ),
]
From = Annotated[
    Path | None, typer.Option("--from", help="Folder or file of a dataset. Default: the home's.")
]


@app.command()
def build(
    day: Day = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Every row as recorded, with its secrets: for this machine only."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Write the files of every finished window, and their card, to the local dataset folder."""
    from babylon.core.types import Published
    from babylon.dataset.build import build_windows, selection_of
    from babylon.dataset.card import write_card
    from babylon.dataset.publish import describe_local
    from babylon.dataset.trajectories import Selection
    from babylon.store import Store

    settings = load_settings()
    home = settings.home

    async def write(store: Store) -> tuple[list[Published], list[str]]:
        selection = Selection(safe=False) if raw else await selection_of(store, settings.publish)
        return await build_windows(store, home, selection, day.date() if day else None)

    published, problems = with_store(settings, write)
    if published:
        files, damaged = describe_local(home)
        write_card(home, files, settings.publish)
        problems += damaged
    if json:
        print_json({"published": [asdict(one) for one in published]})
    else:
        rows = [[one.window_id, one.rows, settings.home.resolve(one.uri)] for one in published]
        print_table("Dataset", ["window", "rows", "file"], rows)
    for problem in problems:
        typer.echo(problem, err=True)
    # The command did not do what it was asked, so it must not exit with 0.
    if problems:
        raise typer.Exit(1)
    if not published:
        when = f"of {day:%Y-%m-%d} is finished" if day else "is finished yet"
        typer.echo(f"no window {when}: nothing was written", err=True)
        raise typer.Exit(1)


@app.command()
def publish(
    day: Day = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be sent, and send nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Send finished windows that are not published yet to the hub, one commit for each day."""
    from babylon.dataset.publish import publish_days

    settings = load_settings()
    days = with_store(
        settings,
        publish_days,
        settings.home,
        settings.publish,
        day=day.date() if day else None,
        dry_run=dry_run,
    )
    if json:
        told = [{**asdict(one), "bytes": one.bytes} for one in days]
        print_json({"dry_run": dry_run, "repository": settings.publish.repository, "days": told})
    elif days:
        _print_days(days, "Not sent" if dry_run else "Sent")
    else:
        print(f"nothing to send to {settings.publish.repository}")


def _print_days(days: list["PublishedDay"], title: str) -> None:
    rows = [
        [one.day, file.path, file.rows, file.bytes, one.revision[:10] or None]
        for one in days
        for file in one.files
    ]
    print_table(title, ["day", "file", "rows", "bytes", "commit"], rows)


@app.command()
def status(json: Json = False) -> None:
    """Show what is published, and what waits."""
    from babylon.dataset.publish import publishing_status

    settings = load_settings()
    show_values(asdict(with_store(settings, publishing_status, settings.publish)), json)


@app.command()
def card(source: From = None) -> None:
    """Print the card of the local dataset."""
    from babylon.core.errors import ConfigError

    path = (source or load_settings().home.datasets) / "README.md"
    if not path.exists():
        raise ConfigError(f"{path} does not exist: run `babylon dataset build` first")
    print(path.read_text(encoding="utf-8"))


@app.command()
def erase(
    agent: Annotated[str | None, typer.Option(metavar="ID", help="Agent to take down.")] = None,
    trajectory: Annotated[
        str | None, typer.Option(metavar="ID", help="Trajectory to take down.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Kept with the take-down.")] = "",
    apply: Annotated[
        bool, typer.Option("--apply", help="Rewrite the files. Without it, only report.")
    ] = False,
    squash: Annotated[
        bool, typer.Option("--squash", help="With --apply: drop the repository's history.")
    ] = False,
    json: Json = False,
) -> None:
    """Show where an agent's play went and which policies learnt from it; with --apply remove it."""
    from babylon.dataset.erase import erase as take_down

    # Two names at once would need two reasons, and one report for both.
    if not (agent or trajectory) or (agent and trajectory):
        raise typer.BadParameter("give either --agent ID or --trajectory ID")
    if squash and not apply:
        raise typer.BadParameter("--squash changes the repository: give --apply too")
    settings = load_settings()
    found = with_store(
        settings,
        take_down,
        settings.home,
        settings.publish,
        "agent" if agent else "trajectory",
        agent or trajectory,
        reason=reason,
        apply=apply,
        squash=squash,
    )
    values: dict[str, Any] = {**asdict(found), "advice": list(found.advice)}
    show_values(values, json)


@app.command()
def export(
    target: Annotated[
        ExportTarget, typer.Option("--to", help="Format of another library.", case_sensitive=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="New file of JSON lines.")],
    source: From = None,
    json: Json = False,
) -> None:
    """Write a dataset's trajectories for another library."""
    from babylon.dataset.export import export_dataset

    place = source or load_settings().home.datasets
    counts = export_dataset(place, target, output)
    show_values({"file": str(output), **counts}, json)


@app.command()
def replay(
    agent: Annotated[str, typer.Option(metavar="ID", help="Recorded agent that is replaced.")],
    window: Annotated[
        str,
        typer.Option(metavar="PREFIX", help="Windows of a month, a day, or one id. Default: all."),
    ] = "",
    policy: Annotated[
        str,
        typer.Option(
            metavar="PLAYER", help="recorded, scripted:NAME, a policy version or a checkpoint path."
        ),
    ] = "recorded",
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Folder or file of a dataset. Default: the database."),
    ] = None,
    interpolate: Annotated[
        bool,
        typer.Option(
            "--interpolate", help="Interpolate prices of which only start and end are known."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Play recorded windows again with a policy, and compare its P&L with the recorded one."""
    from babylon.cli.replay_page import print_replay
    from babylon.dataset.replay.comparison import replay_report
    from babylon.store import open_store

    if source is not None and interpolate:
        raise typer.BadParameter("--interpolate is for the database: a dataset has its prices")
    settings = load_settings()
    report = asyncio.run(
        replay_report(
            partial(open_store, settings),  # not open yet: a dataset needs no database
            settings.seed,
            window,
            agent,
            policy,
            source=source,
            interpolate=interpolate,
        )
    )
    if json:
        print_json(report.summary())
    else:
        print_replay(report)
