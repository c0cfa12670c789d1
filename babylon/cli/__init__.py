"""The command line: ``babylon COMMAND [--json]``. Each group of commands is one module.

Results go to stdout, as one JSON object with ``--json``. Logs and progress go to stderr. The exit
code is 0 when the command succeeds, 1 when it fails, 2 for wrong usage, and 130 after Ctrl-C or
SIGTERM. A ``BabylonError`` prints one line. Any other exception is a bug and prints its traceback.

Modules in this package import only light modules at the top, so that ``--help`` is fast.
"""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Annotated

import typer

import babylon
from babylon.cli import (
    agents,
    arena,
    backup,
    baseline,
    calls,
    config,
    database,
    dataset,
    deploy,
    doctor,
    judge,
    keys,
    model,
    population,
    services,
    training,
    windows,
)
from babylon.cli.output import fail, print_json, show_logs, storage_error
from babylon.core.errors import BabylonError, ConfigError

WRONG_USAGE = 2
app = typer.Typer(
    name="babylon",
    help="Continuous reinforcement learning for fleets of live LLM agents.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for module in (training, services, backup, doctor):
    app.add_typer(module.app)
for name, module in {
    "windows": windows,
    "judge": judge,
    "model": model,
    "population": population,
    "baseline": baseline,
    "deploy": deploy,
    "keys": keys,
    "calls": calls,
    "dataset": dataset,
    "db": database,
    "config": config,
    "agents": agents,
    "arena": arena,
}.items():
    app.add_typer(module.app, name=name)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(babylon.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> None:
    """Run the console script. Always ends with ``SystemExit``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_logs()
    signal.signal(signal.SIGTERM, _like_ctrl_c)
    json = "--json" in arguments
    try:
        _require_text(arguments)
        app(arguments)
    except BabylonError as error:
        sys.exit(fail(error, json=json))
    except OSError as error:
        sys.exit(fail(storage_error(error), json=json))
    except SystemExit as left:
        if json and left.code == WRONG_USAGE:  # Typer itself writes only to stderr
            print_json({"error": _usage_message(left), "kind": "UsageError"})
        raise


def _require_text(arguments: Sequence[str]) -> None:
    """Refuse an argument that neither Postgres nor JSON can hold. A file may have such a name.

    Raises:
        ConfigError: an argument is not UTF-8.
    """
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            if not os.path.exists(argument):
                raise ConfigError(
                    f"argument {argument!r} is not UTF-8: write it in UTF-8"
                ) from error


def _like_ctrl_c(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM like Ctrl-C, with the SIGINT handler that asyncio installs while it runs.

    A shell script ignores SIGINT in the processes that it starts in the background. Then raise
    ``KeyboardInterrupt`` directly.
    """
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(number, frame)


def _usage_message(left: SystemExit) -> str:
    """Return the message of the usage error that made Typer exit."""
    message = getattr(left.__context__, "format_message", None)
    return message() if message else "wrong usage: see --help"
