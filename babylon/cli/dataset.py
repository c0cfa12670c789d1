"""``babylon dataset``: trained windows as Parquet files, and recorded windows played again."""

import asyncio
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from babylon.cli.options import Json
from babylon.cli.output import print_json, print_table, with_store
from babylon.core.settings import load_settings

app = typer.Typer(
    help="Build a dataset of trained windows, and replay recorded ones.", no_args_is_help=True
)
MONTH = "%Y-%m"


@app.command()
def build(
    day: Annotated[
        datetime | None,
        typer.Option(
            formats=["%Y-%m-%d"], metavar="YYYY-MM-DD", help="Only the windows of this UTC day."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write the Parquet files of every trained window to the local dataset folder."""
    from babylon.core.types import Published
    from babylon.dataset.build import build_tables, windows_of
    from babylon.store import Store

    settings = load_settings()

    async def write(store: Store) -> list[Published]:
        windows = await windows_of(store, day.date() if day else None)
        tables = [await build_tables(store, settings.home, window) for window in windows]
        return [published for table in tables for published in table]

    published = with_store(settings, write)
    if json:
        print_json({"published": [asdict(one) for one in published]})
    else:
        rows = [[one.window_id, one.rows, settings.home.resolve(one.uri)] for one in published]
        print_table("Dataset", ["window", "rows", "file"], rows)
    # The command did not do what it was asked, so it must not exit with 0.
    if not published:
        when = f"of {day:%Y-%m-%d} was trained" if day else "was trained yet"
        typer.echo(f"no window {when}: nothing was written", err=True)
        raise typer.Exit(1)


@app.command()
def replay(
    agent: Annotated[str, typer.Option(metavar="ID", help="Recorded agent that is replaced.")],
    month: Annotated[
        datetime | None,
        typer.Option(formats=[MONTH], metavar="YYYY-MM", help="Windows of this month (UTC)."),
    ] = None,
    window: Annotated[str | None, typer.Option(metavar="ID", help="One window.")] = None,
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

    if (month is None) == (window is None):
        raise typer.BadParameter("give either --month YYYY-MM or --window ID")
    prefix = window or f"{month:{MONTH}}"
    settings = load_settings()
    report = asyncio.run(
        replay_report(
            partial(open_store, settings),  # not open yet: a dataset needs no database
            settings.seed,
            prefix,
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
