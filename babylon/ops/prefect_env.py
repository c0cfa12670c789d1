"""Prefect's environment, as plain strings: the library itself never imports Prefect.

One home, one Prefect: its profile, logs and server database lie under ``<home>/prefect``. A flow
that runs inline talks to an ephemeral API with an in-memory database: the truth is in our own
Postgres, and a file of SQLite costs retries of two seconds whenever a write finds it locked.
"""

from collections.abc import Mapping
from pathlib import Path

IN_MEMORY = "sqlite+aiosqlite:///:memory:"


def inline_environment(home: Path) -> dict[str, str]:
    """Defaults for a flow that runs in this process; variables that are already set win."""
    return _quiet(home) | {
        "PREFECT_LOGGING_LEVEL": "CRITICAL",  # who called the flow reports its errors, once
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": IN_MEMORY,
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "true",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    }


def served_environment(home: Path, port: int, environ: Mapping[str, str]) -> dict[str, str]:
    """For server, workers and the ``prefect`` command under ``babylon up``."""
    database = f"sqlite+aiosqlite:///{home / 'prefect' / 'prefect.db'}"
    defaults = _quiet(home) | {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database,
        "PREFECT_WORKER_QUERY_SECONDS": "2",
    }
    return defaults | dict(environ) | {"PREFECT_API_URL": api_url(port)}


def api_url(port: int) -> str:
    return f"http://127.0.0.1:{port}/api"


def _quiet(home: Path) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLI_PROMPT": "false",
        "DO_NOT_TRACK": "1",
    }
