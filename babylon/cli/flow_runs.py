"""Run Prefect flows in this process: Prefect's environment, signals and errors.

Prefect reads its environment at its first import, so everything here imports it, and the flows,
only after ``prepare_prefect``.
"""

import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from babylon.cli.output import fail, is_storage
from babylon.core.errors import BabylonError, DatabaseError
from babylon.core.home import make_directory

INTERRUPTED = 130  # exit code of a shell for a process that SIGINT ended
_HEALTH_S = 5.0
_QUIET = {  # errors are reported in one line; tracebacks and bars of libraries would bury it
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "TQDM_DISABLE": "1",
}


class InterruptedRunError(BabylonError):
    """A signal ended the run."""


def prepare_prefect(home: Path) -> None:
    """Set Prefect's environment for flows that run in this process. Variables that are set win.

    Where ``babylon up`` runs, flows report to its server, else to a server of their own.

    Raises:
        StorageError: Prefect's directory cannot be made.
    """
    from babylon.ops.prefect_env import inline_environment

    defaults = inline_environment(home) | _QUIET
    if "PREFECT_API_URL" not in os.environ and (api := _running_api(home)):
        defaults["PREFECT_API_URL"] = api
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    make_directory(Path(os.environ["PREFECT_HOME"]))


@contextmanager
def prefect_ready(home: Path, *, json: bool) -> Iterator[None]:
    """Prepare Prefect for the flows of the body, and translate the errors that they raise.

    SIGTERM ends the body as Ctrl-C does.

    Raises:
        SystemExit: 130 after a signal.
        DatabaseError: the connection to the database broke.
    """
    prepare_prefect(home)
    from babylon.store.connection import UNREACHABLE

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    except stop_signals() as error:
        fail(InterruptedRunError("stopped by a signal; run it again"), json=json)
        raise SystemExit(INTERRUPTED) from error
    except BabylonError:
        raise
    except UNREACHABLE as error:
        if isinstance(error, OSError) and (error.filename or is_storage(error)):
            raise
        raise DatabaseError(
            f"the connection to the database failed with {type(error).__name__}: {error};"
            " check it with `babylon db status` and run this again"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, before)


def stop_signals() -> tuple[type[BaseException], ...]:
    """Return the exceptions that Ctrl-C and SIGTERM raise inside and outside a flow."""
    from prefect.exceptions import TerminationSignal

    return (KeyboardInterrupt, TerminationSignal)


def _running_api(home: Path) -> str | None:
    """Return the API address of the Prefect server of ``babylon up``, if it answers.

    The server is on record seconds before it answers, and Prefect does not wait for it.
    """
    from babylon.ops.prefect_env import api_url
    from babylon.ops.up.processes import Processes
    from babylon.ops.up.services import SERVER

    server = Processes(home=home).running(SERVER)
    if server is None or server.port is None:
        return None
    api = api_url(server.port)
    try:
        with urlopen(f"{api}/health", timeout=_HEALTH_S):
            return api
    except (OSError, HTTPException):
        return None
