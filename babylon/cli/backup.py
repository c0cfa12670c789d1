"""``babylon backup`` and ``babylon restore``."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from babylon.cli.options import Json
from babylon.cli.output import show_values, with_store
from babylon.core.settings_loading import load_settings

app = typer.Typer()


@app.command()
def backup(
    target: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="A new directory.")],
    json: Json = False,
) -> None:
    """Back up database and files while the system runs.

    Of a game's database only schema babylon is included; exit code 1 if the files of a policy are
    damaged.
    """
    from babylon.ops.backup.backup import back_up, summary

    manifest = with_store(load_settings(), back_up, target)
    show_values({"backup": str(target.absolute()), **summary(manifest)}, json)
    raise typer.Exit(1 if manifest.problems else 0)


@app.command()
def restore(
    source: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="A directory that `babylon backup` wrote.")
    ],
    json: Json = False,
) -> None:
    """Restore a backup into a new BABYLON_HOME and an empty database, of any supported version."""
    from babylon.ops.backup import restore as restoring
    from babylon.ops.backup.backup import summary

    settings = load_settings()
    manifest = asyncio.run(restoring.restore(settings.database, settings.home, source))
    show_values({"home": str(settings.home.root), **summary(manifest)}, json)
