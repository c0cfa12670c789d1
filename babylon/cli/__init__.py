"""The command line: ``babylon COMMAND [--json]``, one module a group of commands.

Results go to stdout, as one JSON object with ``--json``; logs and progress go to stderr. The exit
code is 0 only when the command did what it was asked: 1 otherwise, 2 for wrong usage, 130 when
Ctrl-C or SIGTERM ended it. A ``BabylonError`` is one line; anything else is a bug and shows its
traceback.

Modules here import at the top only what is quick to import, so that ``--help`` is.
"""

import signal
import sys
from collections.abc import Sequence
from types import FrameType

import typer

from babylon.cli import (
    agents,
    arena,
    config,
    database,
    dataset,
    deploy,
    doctor,
    judge,
    keys,
    model,
    services,
    training,
    windows,
)
from babylon.cli.output import fail, print_json, show_logs, storage_error
from babylon.core.errors import BabylonError

WRONG_USAGE = 2
app = typer.Typer(
    name="babylon",
    help="Continuous reinforcement learning for fleets of live LLM agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for module in (training, services, doctor):
    app.add_typer(module.app)
for name, module in {
    "windows": windows,
    "judge": judge,
    "model": model,
    "deploy": deploy,
    "keys": keys,
    "dataset": dataset,
    "db": database,
    "config": config,
    "agents": agents,
    "arena": arena,
}.items():
    app.add_typer(module.app, name=name)


def main(argv: Sequence[str] | None = None) -> None:
    """The console script; leaves by ``SystemExit``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_logs()
    signal.signal(signal.SIGTERM, _like_ctrl_c)
    json = "--json" in arguments
    try:
        app(arguments)
    except BabylonError as error:
        sys.exit(fail(error, json=json))
    except OSError as error:
        sys.exit(fail(storage_error(error), json=json))
    except SystemExit as left:
        if json and left.code == WRONG_USAGE:  # Typer told a person, on stderr
            print_json({"error": _usage_message(left), "kind": "UsageError"})
        raise


def _like_ctrl_c(number: int, frame: FrameType | None) -> None:
    """SIGTERM tidies up as Ctrl-C does: by its handler, which asyncio replaces while it runs.

    Where there is none, because a script started us in the background, it interrupts all the same.
    """
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(number, frame)


def _usage_message(left: SystemExit) -> str:
    """Typer leaves while it handles the error that says what was wrong."""
    message = getattr(left.__context__, "format_message", None)
    return message() if message else "wrong usage: see --help"
