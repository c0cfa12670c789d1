"""``babylon dataset``: trained windows as Parquet files, and recorded windows played again."""

import asyncio
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from babylon.cli.options import Json
from babylon.cli.output import print_json, print_table, stderr
from babylon.core.settings import Settings, load_settings

if TYPE_CHECKING:
    from babylon.core.types import Published
    from babylon.dataset.replay.comparison import ReplayReport

app = typer.Typer(
    help="Trained windows as a dataset, recorded windows as scenarios.", no_args_is_help=True
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
    settings = load_settings()
    published = asyncio.run(_build(settings, day))
    if json:
        print_json({"published": [asdict(one) for one in published]})
    else:
        from babylon.core.artifacts import local_path

        rows = [[one.window_id, one.rows, str(local_path(one.uri))] for one in published]
        print_table("Dataset", ["window", "rows", "file"], rows)
    if not published:
        when = f"of {day:%Y-%m-%d} was trained" if day else "was trained yet"
        typer.echo(f"no window {when}: nothing was written", err=True)
        raise typer.Exit(1)


@app.command()
def replay(
    agent: Annotated[str, typer.Option(metavar="ID", help="Whose place is taken.")],
    month: Annotated[
        datetime | None,
        typer.Option(formats=[MONTH], metavar="YYYY-MM", help="Windows of this month (UTC)."),
    ] = None,
    window: Annotated[str | None, typer.Option(metavar="ID", help="One window.")] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="WHO",
            help="Who plays: recorded, scripted:NAME, a policy version, or a checkpoint's path.",
        ),
    ] = "recorded",
    source: Annotated[
        Path | None,
        typer.Option("--from", help="A dataset's folder or file, in place of the database."),
    ] = None,
    interpolate: Annotated[
        bool,
        typer.Option(
            "--interpolate", help="Draw straight lines where only start and end are known."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Play recorded windows again and compare with what the recorded agent made of them."""
    from babylon.dataset.replay.comparison import replay_report

    if (month is None) == (window is None):
        raise typer.BadParameter("give --month YYYY-MM or --window ID, one of them")
    prefix = window or f"{month:{MONTH}}"
    report = asyncio.run(
        replay_report(
            load_settings(), prefix, agent, policy, source=source, interpolate=interpolate
        )
    )
    if json:
        print_json(report.summary())
    else:
        _show(report)


def _show(report: "ReplayReport") -> None:
    rows = [
        [
            one.scenario_id,
            one.prices,
            Text(f"{one.recorded_pnl:+,.2f}"),
            Text(f"{one.replayed_pnl:+,.2f}"),
            Text(f"{one.difference:+,.2f}"),
            Text(f"{one.malformed:.0%}"),
        ]
        for one in report.results
    ]
    columns = ["scenario", "prices", "recorded P&L", "replayed P&L", "difference", "malformed"]
    print_table(f"{report.policy} in the place of {report.agent}", columns, rows)
    print(
        f"{len(report.results)} scenarios, mean P&L {report.mean_recorded:+.2f} recorded,"
        f" {report.mean_replayed:+.2f} replayed (USD)"
    )
    for line in report.missing:
        stderr.print(f"not recorded: {line}")
    for skipped in report.skipped:
        stderr.print(f"not replayed: {skipped.reason}")


async def _build(settings: Settings, day: datetime | None) -> "list[Published]":
    from babylon.dataset.build import build_tables, windows_of
    from babylon.store import open_store

    async with open_store(settings) as store:
        windows = await windows_of(store, day.date() if day else None)
        tables = [await build_tables(store, settings, one) for one in windows]
    return [published for table in tables for published in table]
