"""``babylon db``: the schema, and rows and traces in and out."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from babylon.cli.options import Json
from babylon.cli.output import show_values, with_store
from babylon.core.home import Home
from babylon.core.settings import DatabaseSettings
from babylon.core.settings_loading import load_settings
from babylon.core.windows import parse_window_id
from babylon.formats.format_names import Format, Written

app = typer.Typer(help="The database: its schema, imports and exports.", no_args_is_help=True)


@app.command()
def migrate(json: Json = False) -> None:
    """Migrate the database to the newest version. The game's own tables are never altered."""
    show_values(asyncio.run(_migrate()), json)


@app.command()
def status(json: Json = False) -> None:
    """Show the database's address and version. The exit code is 1 if it is not the newest."""
    settings = load_settings()
    found = asyncio.run(_status(settings.database, settings.home))
    show_values(found, json)
    raise typer.Exit(0 if found["revision"] == found["head"] else 1)


@app.command("import")
def import_(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, metavar="FILE...")],
    format: Annotated[
        Format | None, typer.Option(help="Format of all files. Default: detected for each file.")
    ] = None,
    window: Annotated[
        str | None, typer.Option(metavar="ID", help="Window for traces without times.")
    ] = None,
    agent: Annotated[
        str, typer.Option(metavar="ID", help="Agent for traces that name none.")
    ] = "imported",
    json: Json = False,
) -> None:
    """Import the game's own rows or traces of other systems. Existing rows stay.

    Rows are JSON lines, one file for each table. docs/formats.md lists the traces."""
    from babylon.formats.import_files import import_files

    settings = load_settings()
    added = with_store(
        settings,
        import_files,
        files,
        format=format,
        window=None if window is None else parse_window_id(window, settings.windows.minutes),
        agent_id=agent,
        minutes=settings.windows.minutes,
    )
    show_values(dict(added), json)


@app.command()
def export(
    window: Annotated[str, typer.Option(metavar="ID", help="Window to export.")],
    format: Annotated[Written, typer.Option(help="Format of the output.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Output file; for the format game a folder of files."),
    ],
    json: Json = False,
) -> None:
    """Export a window: the game's rows as they are, or ATIF or chat traces without ground truth."""
    from babylon.formats.export_files import export_game, export_traces

    settings = load_settings()
    exported = parse_window_id(window, settings.windows.minutes)
    if format is Written.GAME:
        counts = dict(with_store(settings, export_game, exported, output))
    else:
        counts = {"lines": with_store(settings, export_traces, exported, format, output)}
    show_values(counts, json)


async def _migrate() -> dict[str, object]:
    from babylon.store import open_store

    settings = load_settings()
    async with open_store(settings, migrate=True):
        return await _status(settings.database, settings.home)


async def _status(database: DatabaseSettings, home: Home) -> dict[str, object]:
    from babylon.store import database_status

    return asdict(await database_status(database, home))
