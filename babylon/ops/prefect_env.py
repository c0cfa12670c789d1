"""Prefect's environment variables. The library itself never imports Prefect.

One home, one Prefect: its profile and logs lie under ``<home>/prefect``. The server of ``babylon
up`` has a database of its own in our Postgres. A flow that runs inline talks to an ephemeral API
with an in-memory database: a file of SQLite costs retries of two seconds whenever it is locked.
"""

import os
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from babylon.core.home import make_directory
from babylon.core.processes import Processes

SERVER = "prefect-server"  # the process that `babylon up` records
IN_MEMORY = "sqlite+aiosqlite:///:memory:"
_HEALTH_S = 5.0
# Our own records and Prefect's states reach the page of their run. The console, which is the log
# of a worker, shows warnings only. Without the level of the root, ours would be left out.
_LOGGED = {
    "PREFECT_LOGGING_EXTRA_LOGGERS": "babylon",
    "PREFECT_LOGGING_LEVEL": "INFO",
    "PREFECT_LOGGING_ROOT_LEVEL": "INFO",
    "PREFECT_LOGGING_TO_API_ENABLED": "true",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
}


def prepare_inline_run(home: Path) -> None:
    """Set this process's environment for flows that run in it. Call it before importing Prefect.

    Prefect reads its environment when it is first imported. Flows report to the server that
    ``babylon up`` started for this home, if it answers. Variables that are already set win.

    Raises:
        StorageError: Prefect's directory cannot be made.
    """
    defaults = inline_environment(home)
    if "PREFECT_API_URL" in os.environ:
        defaults |= _LOGGED
    elif api := _running_server(home):
        defaults |= {"PREFECT_API_URL": api, **_LOGGED}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    make_directory(Path(os.environ["PREFECT_HOME"]))


def _running_server(home: Path) -> str | None:
    """The API of this home's server. A server is on record for seconds before it answers."""
    record = Processes(home=home).running(SERVER)
    if record is None or record.port is None:
        return None
    api = api_url(record.port)
    try:
        with urlopen(f"{api}/health", timeout=_HEALTH_S):
            return api
    except (OSError, HTTPException):
        return None


def inline_environment(home: Path) -> dict[str, str]:
    """Defaults for a flow that runs in this process. Variables that are already set win."""
    return _quiet(home) | {
        "PREFECT_LOGGING_LEVEL": "CRITICAL",  # the caller of the flow reports its errors
        "PREFECT_LOGGING_TO_API_ENABLED": "false",  # nobody reads the log of an ephemeral API
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": IN_MEMORY,
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "true",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    }


def served_environment(home: Path, port: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of server, workers and ``prefect`` commands under ``babylon up``."""
    defaults = (
        _quiet(home)
        | _LOGGED
        | {
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            # By default only events are removed, and logs and pages grow for ever.
            "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
            "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": "2592000",  # 30 days, as play has
        }
    )
    return defaults | dict(environ) | {"PREFECT_API_URL": api_url(port)}


def api_url(port: int) -> str:
    return f"http://127.0.0.1:{port}/api"


def _quiet(home: Path) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLIENT_MAX_RETRIES": "7",  # four minutes, until a server that died is back
        "PREFECT_CLI_PROMPT": "false",
        "DO_NOT_TRACK": "1",
    }
