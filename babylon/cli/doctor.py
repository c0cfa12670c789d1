"""``babylon doctor``."""

import asyncio
from dataclasses import asdict

import typer

from babylon.cli.options import Json
from babylon.cli.output import print_json, print_table
from babylon.core.settings_loading import load_settings

app = typer.Typer()


@app.command()
def doctor(json: Json = False) -> None:
    """Check this machine; exit code 1 when something required does not work."""
    from babylon.ops.doctor import examine
    from babylon.ops.finding import Finding

    def verdict(finding: Finding) -> str:
        if finding.ok is None:
            return "unchecked"
        return "ok" if finding.ok else "PROBLEM" if finding.required else "optional"

    findings = asyncio.run(examine(load_settings()))
    well = not any(finding.ok is False and finding.required for finding in findings)
    if json:
        print_json({"ok": well, "checks": [asdict(finding) for finding in findings]})
    else:
        rows = [[finding.name, verdict(finding), finding.detail] for finding in findings]
        print_table("Doctor", ["check", "", "detail"], rows)
    raise typer.Exit(0 if well else 1)
