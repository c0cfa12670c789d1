"""``babylon db``: schema, and rows and traces in and out."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from babylon.cli.options import Json
from babylon.cli.output import print_json
from babylon.core.settings import Settings, load_settings
from babylon.core.windows import parse_window_id
from babylon.formats.names import Format, Written

app = typer.Typer(help="The database, its schema, and what goes in and out.", no_args_is_help=True)


@app.command()
def migrate(json: Json = False) -> None:
    """Bring the database up to date; the game's own tables are never altered."""
    status = asyncio.run(_migrate(load_settings()))
    _show(status, json)


@app.command()
def status(json: Json = False) -> None:
    """Where the database is and which version of the schema it has; exit code 1 when not newest."""
    found = asyncio.run(_status(load_settings()))
    _show(found, json)
    raise typer.Exit(0 if found["revision"] == found["head"] else 1)


@app.command("import")
def import_(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, metavar="FILE...")],
    format: Annotated[
        Format | None, typer.Option(help="Of every file; by default each file tells its own.")
    ] = None,
    window: Annotated[
        str | None, typer.Option(metavar="ID", help="Where traces without times go.")
    ] = None,
    agent: Annotated[
        str, typer.Option(metavar="ID", help="Whose traces are that name no agent.")
    ] = "imported",
    json: Json = False,
) -> None:
    """Read the game's own rows (JSON lines, one table a file), or traces of other systems (ATIF,
    chat messages, OpenTelemetry GenAI spans, OpenInference); rows already there stay."""
    counts = asyncio.run(_import(load_settings(), files, format, window, agent))
    _show(counts, json)


@app.command()
def export(
    window: Annotated[str, typer.Option(metavar="ID", help="The window to write.")],
    format: Annotated[Written, typer.Option(help="What to write.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="A file; of format game a folder, one file a table."),
    ],
    json: Json = False,
) -> None:
    """Write a window's play: the game's rows as they are, or ATIF or chat without ground truth."""
    counts = asyncio.run(_export(load_settings(), window, format, output))
    _show(counts, json)


def _show(values: dict[str, Any], json: bool) -> None:
    if json:
        print_json(values)
    else:
        for name, value in values.items():
            print(f"{name:18} {value}")


async def _migrate(settings: Settings) -> dict[str, Any]:
    from babylon.store import open_store

    async with open_store(settings, migrate=True):
        return await _status(settings)


async def _status(settings: Settings) -> dict[str, Any]:
    from babylon.store import database_status

    return asdict(await database_status(settings))


async def _import(
    settings: Settings, files: list[Path], format: Format | None, window: str | None, agent: str
) -> dict[str, Any]:
    from babylon.formats.import_files import import_files
    from babylon.store import open_store

    async with open_store(settings) as store:
        added = await import_files(
            store,
            files,
            format=format,
            window=None if window is None else parse_window_id(window, settings.windows.minutes),
            agent_id=agent,
            minutes=settings.windows.minutes,
        )
        return dict(added)


async def _export(settings: Settings, window: str, format: Written, output: Path) -> dict[str, Any]:
    from babylon.formats.export_files import export_game, export_traces
    from babylon.store import open_store

    parse_window_id(window, settings.windows.minutes)
    async with open_store(settings) as store:
        if format is Written.GAME:
            return dict(await export_game(store, window, output))
        return {"lines": await export_traces(store, window, format, output)}
