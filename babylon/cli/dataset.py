"""``babylon dataset``: trained windows as Parquet files."""

import asyncio
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from babylon.cli.options import Json
from babylon.cli.output import print_json, print_table
from babylon.settings import Settings, load_settings

if TYPE_CHECKING:
    from babylon.types import Published

app = typer.Typer(help="Trained windows as a dataset.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps ``build`` a command of its own while it is the only one."""


@app.command()
def build(
    day: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d"], help="Only the windows of this UTC day."),
    ] = None,
    json: Json = False,
) -> None:
    """Write the Parquet file of every trained window to the local dataset folder."""
    settings = load_settings()
    published = asyncio.run(_build(settings, day))
    if json:
        print_json({"published": [asdict(one) for one in published]})
    else:
        from babylon.artifacts import local_path

        rows = [[one.window_id, one.rows, str(local_path(one.uri))] for one in published]
        print_table("Dataset", ["window", "rows", "file"], rows)
    if not published:
        when = f"of {day:%Y-%m-%d} was trained" if day else "was trained yet"
        typer.echo(f"no window {when}: nothing was written", err=True)
        raise typer.Exit(1)


async def _build(settings: Settings, day: datetime | None) -> "list[Published]":
    from babylon.dataset.build import windows_of
    from babylon.dataset.export import publish_window
    from babylon.store import open_store

    async with open_store(settings) as store:
        scored = await windows_of(store, day.date() if day else None)
    return [publish_window(settings, one) for one in scored]
