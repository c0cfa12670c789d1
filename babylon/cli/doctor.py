"""``babylon doctor``."""

import asyncio
from dataclasses import asdict

import typer

from babylon.cli.options import Json
from babylon.cli.output import print_json, print_table
from babylon.settings import load_settings

app = typer.Typer()


@app.command()
def doctor(json: Json = False) -> None:
    """What works and what does not; exit code 1 when something required does not."""
    from babylon.doctor import examine

    checks = asyncio.run(examine(load_settings()))
    well = all(check.ok or not check.required for check in checks)
    if json:
        print_json({"ok": well, "checks": [asdict(check) for check in checks]})
    else:
        rows = [
            [c.name, "ok" if c.ok else "MISSING" if c.required else "optional", c.detail]
            for c in checks
        ]
        print_table("Doctor", ["check", "", "detail"], rows)
    raise typer.Exit(0 if well else 1)
