"""Run Prefect flows in this process: Prefect's environment, signals and errors.

Prefect reads its environment at its first import, so everything here imports it, and the flows,
only after ``prepare_prefect``.
"""

import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from babylon.cli.output import fail, is_storage
from babylon.core.errors import BabylonError, DatabaseError, ServingError
from babylon.core.home import Home
from babylon.core.settings import PrefectSettings

INTERRUPTED = 130  # exit code of a shell for a process that SIGINT ended
_QUIET = {  # errors are reported in one line; tracebacks and bars of libraries would bury it
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "TQDM_DISABLE": "1",
}


class InterruptedRunError(BabylonError):
    """A signal ended the run."""


def prepare_prefect(home: Home, prefect: PrefectSettings) -> None:
    """Set Prefect's environment for flows that run in this process. Variables that are set win.

    Raises:
        StorageError: Prefect's directory cannot be made.
    """
    from babylon.ops.prefect_env import prepare_inline_run

    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    prepare_inline_run(home, prefect)


@contextmanager
def prefect_ready(home: Home, prefect: PrefectSettings, *, json: bool) -> Iterator[None]:
    """Prepare Prefect for the flows of the body, and translate the errors that they raise.

    SIGTERM ends the body as Ctrl-C does.

    Raises:
        SystemExit: 130 after a signal.
        DatabaseError, ServingError: the database or Prefect's server does not answer.
    """
    prepare_prefect(home, prefect)
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
        said = f"{type(error).__name__}: {error}".rstrip(": ")  # a timeout has no text
        raise DatabaseError(
            f"the connection to the database failed with {said};"
            " check it with `babylon db status` and run this again"
        ) from error
    except RuntimeError as error:
        if "Failed to reach API" not in str(error):  # Prefect has no type for it
            raise
        raise ServingError(f"{error}: start that server, or unset PREFECT_API_URL") from error
    finally:
        signal.signal(signal.SIGTERM, before)


def stop_signals() -> tuple[type[BaseException], ...]:
    """Return the exceptions that Ctrl-C and SIGTERM raise inside and outside a flow."""
    from prefect.exceptions import TerminationSignal

    return (KeyboardInterrupt, TerminationSignal)
