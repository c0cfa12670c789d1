"""``babylon db``: schema and the game's own rows."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from babylon.cli.options import Json
from babylon.cli.output import print_json
from babylon.settings import Settings, load_settings

app = typer.Typer(help="The database and its schema.", no_args_is_help=True)


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
    json: Json = False,
) -> None:
    """Read the game's own rows (JSON lines, one table a file); rows already there stay."""
    counts = asyncio.run(_import(load_settings(), files))
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


async def _import(settings: Settings, files: list[Path]) -> dict[str, Any]:
    from babylon.store import open_store
    from babylon.store.game_import import import_files

    async with open_store(settings) as store:
        return dict(await import_files(store, files))
