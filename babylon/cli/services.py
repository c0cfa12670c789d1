"""``babylon up | down | status | serve``."""

import asyncio
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from babylon.cli.options import Json
from babylon.cli.output import print_json, print_table, stderr
from babylon.core.api_keys import local_key_path
from babylon.core.settings import Engine, load_settings

app = typer.Typer()


@app.command()
def up(json: Json = False) -> None:
    """Start everything that is not running, and return when it answers."""
    from babylon.ops.up import up

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as progress:
        bar = progress.add_task("database, model, Prefect, workers, serving", total=None)

        def making_model(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total if done < total else None)

        statuses = asyncio.run(up(load_settings(), making_model))
    if not json:
        settings = load_settings()
        key = local_key_path(settings.home.root)
        print(f"agents call {settings.serving.endpoint}/v1 with the key in {key}")
        print(f"Prefect shows every run at http://127.0.0.1:{settings.prefect.port}")
        print(
            f"the admin API answers at http://127.0.0.1:{settings.serving.admin_port}/admin/status"
        )
    _show([asdict(one) for one in statuses], json)


@app.command()
def down(json: Json = False) -> None:
    """Stop what `up` started, and nothing else."""
    from babylon.ops.up import down

    with stderr.status("stopping"):
        stopped = asyncio.run(down(load_settings()))
    if json:
        print_json({"stopped": stopped})
    else:
        print(f"stopped {', '.join(stopped)}" if stopped else "nothing was running")


@app.command()
def status(json: Json = False) -> None:
    """Show process, ports and health of each service; exit code 1 unless all are healthy."""
    from babylon.ops.up import status

    _show([asdict(one) for one in asyncio.run(status(load_settings()))], json)


@app.command()
def serve(
    engine: Annotated[
        Engine | None, typer.Option(help="The embedded engine, or vLLM servers.")
    ] = None,
) -> None:
    """Run engine, gateway and admin API in the foreground."""
    from babylon.serving.serve import serve

    asyncio.run(serve(load_settings(**({"serving": {"engine": engine}} if engine else {}))))


def _show(statuses: list[dict[str, Any]], json: bool) -> None:
    if json:
        print_json({"services": statuses})
    else:
        columns = ["service", "running", "healthy", "pid", "ports", "detail"]
        rows = [
            [*map(one.get, ("name", *columns[1:4])), _listed(one["ports"]), one["detail"]]
            for one in statuses
        ]
        print_table("Services", columns, rows)
    raise typer.Exit(0 if all(one["healthy"] for one in statuses) else 1)


def _listed(ports: tuple[int, ...]) -> str | None:
    return " ".join(map(str, ports)) or None
