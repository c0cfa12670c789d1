"""``babylon doctor``."""

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from babylon.cli.options import Json
from babylon.cli.output import print_json, print_table
from babylon.core.settings import load_settings

if TYPE_CHECKING:
    from babylon.ops.doctor import Check

app = typer.Typer()


@app.command()
def doctor(json: Json = False) -> None:
    """What works and what does not; exit code 1 when something required does not."""
    from babylon.ops.doctor import examine

    checks = asyncio.run(examine(load_settings()))
    well = not any(check.ok is False and check.required for check in checks)
    if json:
        print_json({"ok": well, "checks": [asdict(check) for check in checks]})
    else:
        rows = [[check.name, _word(check), check.detail] for check in checks]
        print_table("Doctor", ["check", "", "detail"], rows)
    raise typer.Exit(0 if well else 1)


def _word(check: "Check") -> str:
    if check.ok is None:
        return "unchecked"
    return "ok" if check.ok else "PROBLEM" if check.required else "optional"
