"""``babylon up | down | status | serve``."""

import asyncio
from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from babylon.cli.options import Json
from babylon.cli.output import print_json, print_table, stderr, with_store
from babylon.core.api_keys import local_key_path, prefect_auth_path
from babylon.core.settings import Engine
from babylon.core.settings_loading import load_settings

app = typer.Typer()


@app.command()
def up(
    foreground: Annotated[
        bool, typer.Option(help="Run the supervisor in this process, for systemd or a container.")
    ] = False,
    apply: Annotated[
        bool, typer.Option(help="Restart running services if settings changed since.")
    ] = False,
    json: Json = False,
) -> None:
    """Start everything that is not running, and return when it answers."""
    from babylon.ops.prefect_env import prefect_api
    from babylon.ops.up import up
    from babylon.ops.up.supervisor import Supervisor

    if foreground and (apply or json):
        # Settings are read at its start, and its output is a log.
        raise typer.BadParameter("--foreground takes neither --apply nor --json")
    settings = load_settings()
    if foreground:
        asyncio.run(Supervisor(settings).run())
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as progress:
        bar = progress.add_task("starting", total=None)

        def making_model(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total if done < total else None)

        report = asyncio.run(up(settings, making_model, apply=apply, say=stderr.print))
    # Settings are not applied unasked: a restart breaks off the calls that run.
    if report.changed:
        stderr.print(f"changed and not in force: {', '.join(report.changed)}; {report.remedy}")
    if not json:
        key = local_key_path(settings.home.root)
        print(f"agents call {settings.serving.endpoint}/v1 with the key in {key}")
        if settings.serving.public_url:
            url = settings.serving.agents_url
            print(f"agents elsewhere call {url}/v1 with a key of `babylon keys create`")
        prefect = prefect_api(settings.home, settings.prefect)
        made = prefect.embedded and settings.prefect.auth is None
        opened = f" with the text in {prefect_auth_path(settings.home.root)}" if made else ""
        print(f"Prefect shows every run at {prefect.ui}{opened}")
        print(f"the status page is at http://127.0.0.1:{settings.serving.admin_port}/")
    _show([asdict(one) for one in report.services], json, changed=report.changed)


@app.command()
def down(json: Json = False) -> None:
    """Stop what `up` started, and nothing else."""
    from babylon.ops.up import down
    from babylon.ops.up.services import services

    settings = load_settings()
    with stderr.status("stopping"):
        stopped = asyncio.run(down(settings.home, settings.database, services(settings)))
    if json:
        print_json({"stopped": stopped})
    else:
        print(f"stopped {', '.join(stopped)}" if stopped else "nothing was running")


@app.command()
def status(json: Json = False) -> None:
    """Show each service and the windows in work; exit code 1 unless all services are healthy."""
    from babylon.ops.up import status, work_in_hand
    from babylon.ops.up.services import services

    settings = load_settings()
    found = asyncio.run(status(settings.home, settings.database, services(settings)))
    work = []
    if found[0].healthy:  # the database
        work = [asdict(one) for one in with_store(settings, work_in_hand)]
    if work and not json:
        columns = ["window", "state", "worker", "lease"]
        print_table("Windows in work", columns, [[*one.values()] for one in work])
    _show([asdict(one) for one in found], json, work=work)


@app.command()
def serve(
    engine: Annotated[
        Engine | None, typer.Option(help="The embedded engine, or vLLM servers.")
    ] = None,
) -> None:
    """Run engine, gateway and admin API in the foreground."""
    from babylon.serving.serve import serve

    asyncio.run(serve(load_settings(**({"serving": {"engine": engine}} if engine else {}))))


@app.command()
def engine() -> None:
    """Run an engine alone, at ENGINE_LISTEN, for gateways on other machines."""
    from babylon.serving.serve import serve_engine

    settings = load_settings()
    asyncio.run(serve_engine(settings.serving, settings.home, settings.environment()))


@app.command()
def worker(
    pool: Annotated[Literal["cpu", "gpu"], typer.Option(help="Work pool of its runs.")],
    url: Annotated[
        str | None, typer.Option(help="Address of Prefect's API, instead of PREFECT_API_URL.")
    ] = None,
) -> None:
    """Work for a Prefect server on another machine, in the foreground."""
    from babylon.ops.up.remote_worker import RemoteWorker

    settings = load_settings(**({"prefect": {"api_url": url}} if url else {}))
    asyncio.run(RemoteWorker(settings, pool).run())


@app.command()
def lend(
    number: Annotated[int, typer.Option(min=1, help="This machine's number among TRAIN_NODES.")],
) -> None:
    """Lend this machine's processes to the updates of another one, at TRAIN_RENDEZVOUS."""
    import signal
    import sys

    from babylon.training.processes.launch import lend_processes
    from babylon.training.processes.nodes import Nodes

    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # the processes end with this one
    settings = load_settings()
    training = settings.training
    nodes = Nodes(training.nodes, training.rendezvous or "", number)
    lend_processes(settings.home, training.processes, nodes)


def _show(statuses: list[dict[str, Any]], json: bool, **more: object) -> None:
    if json:
        print_json({"services": statuses, **more})
    else:
        columns = ["service", "running", "healthy", "pid", "ports", "detail"]
        rows = [
            [*map(one.get, ("name", *columns[1:4])), _listed(one["ports"]), one["detail"]]
            for one in statuses
        ]
        print_table("Services", columns, rows)
    fine = all(one["healthy"] for one in statuses) and not more.get("changed")
    raise typer.Exit(0 if fine else 1)


def _listed(ports: tuple[int, ...]) -> str | None:
    return " ".join(map(str, ports)) or None
