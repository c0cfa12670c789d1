"""Prefect's API and environment variables. The library itself never imports Prefect.

One home, one Prefect: its profile and logs lie under ``<home>/prefect``. ``babylon up`` starts a
server with a password and with a database of its own in our Postgres, unless ``PREFECT_API_URL``
names another server or Prefect Cloud. A flow that runs inline talks to an ephemeral API
with an in-memory database: a file of SQLite costs retries of two seconds whenever it is locked.
"""

import os
import time
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

from babylon.core.api_keys import prefect_auth_path
from babylon.core.home import Home, make_directory, make_home
from babylon.core.objects import changed_at, names, remove
from babylon.core.processes import Processes
from babylon.core.settings import PrefectSettings

SERVER = "prefect-server"  # the process that `babylon up` records
IN_MEMORY = "sqlite+aiosqlite:///:memory:"
RETENTION_S = 30 * 24 * 3600  # of runs, logs, pages and results: as long as play is kept
RESULTS_BLOCK = "babylon-results/stored"
HEARTBEAT_S = 30  # of a run: the shortest that Prefect takes
LEASE_STORAGE = "prefect.server.concurrency.lease_storage.filesystem"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefectApi:
    """The API that runs report to.

    ``key`` opens Prefect Cloud, ``auth`` (``user:password``) a server. ``embedded``: ``babylon up``
    starts the server.
    """

    url: str
    key: str = ""
    auth: str = ""
    embedded: bool = True

    @property
    def headers(self) -> dict[str, str]:
        if self.auth:
            return {"Authorization": f"Basic {b64encode(self.auth.encode()).decode()}"}
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def ui(self) -> str:
        """The address of the pages. Those of Prefect Cloud lie on another host."""
        if "/accounts/" not in self.url:
            return self.url.removesuffix("/api")
        page = self.url.replace("/api/", "/").replace("//api.", "//app.")
        return page.replace("/accounts/", "/account/").replace("/workspaces/", "/workspace/")

    @property
    def environment(self) -> dict[str, str]:
        """The variables from which Prefect's client reads the same."""
        return {
            "PREFECT_API_URL": self.url,
            "PREFECT_API_KEY": self.key,
            "PREFECT_API_AUTH_STRING": self.auth,
        }


def prefect_api(home: Home, prefect: PrefectSettings) -> PrefectApi:
    """Return the API that the settings name, else the one of this home's own server.

    An address of our own port on loopback means our own server: people export it to use
    ``prefect`` on the command line, and every worker has it.
    """
    key, auth = (
        secret.get_secret_value() if secret else "" for secret in (prefect.api_key, prefect.auth)
    )
    if prefect.api_url:
        given = urlsplit(prefect.api_url)
        own = given.hostname in ("localhost", "127.0.0.1") and given.port == prefect.port
        if not own:
            return PrefectApi(url=prefect.api_url.rstrip("/"), key=key, auth=auth, embedded=False)
    with suppress(FileNotFoundError):  # before the first `up` there is no server to open
        auth = auth or prefect_auth_path(home.root).read_text().strip()
    return PrefectApi(url=api_url(prefect.port), auth=auth)


def prepare_inline_run(home: Home, prefect: PrefectSettings) -> None:
    """Set this process's environment for flows that run in it. Call it before importing Prefect.

    Prefect reads its environment when it is first imported. Flows report to the API of the
    settings, else to the server that ``babylon up`` started for this home, if it answers. Variables
    that are already set win.

    Raises:
        StorageError: Prefect's directory cannot be made.
    """
    defaults = inline_environment(home.root)
    api = prefect_api(home, prefect)
    if not api.embedded or "PREFECT_API_URL" in os.environ:
        defaults |= api.environment | _LOGGED
    elif url := _running_server(home.root):
        defaults |= replace(api, url=url).environment | _LOGGED
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    make_home(home.root)
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
        # Nobody makes a block in a database that ends with the run, and it takes seconds.
        "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    }


def served_environment(home: Home, api: PrefectApi, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of server, workers and ``prefect`` commands under ``babylon up``."""
    defaults = (
        _quiet(home.root)
        | _LOGGED
        | ({"PREFECT_RESULTS_DEFAULT_STORAGE_BLOCK": RESULTS_BLOCK} if home.store else {})
        | {
            # Prefect unpacks its pages at the start, by default into a package that may belong to
            # another user.
            "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home.root / "prefect" / "ui"),
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            # By default only events are removed, and logs and pages grow for ever.
            "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
            "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(RETENTION_S),
            # In memory, a slot that was held when the server died would never be free again, and
            # every later stage with a model would wait for it.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASE_STORAGE,
            # Each connection keeps the last hundred statements prepared, those that write many
            # rows too. After an hour, Prefect's default, they are megabytes.
            "PREFECT_SERVER_DATABASE_SQLALCHEMY_POOL_RECYCLE": "600",
        }
    )
    # Without a password, every user of the machine could run code as this one.
    password = {"PREFECT_SERVER_API_AUTH_STRING": api.auth} if api.embedded and api.auth else {}
    return defaults | dict(environ) | api.environment | password


def remove_old_results(home: Home) -> int:
    """Delete the results of runs that Prefect removed, here and stored. Return their number.

    Prefect itself never deletes a result.
    """
    oldest = time.time() - RETENTION_S
    removed = 0
    for file in names(home, results(home.root)):
        with suppress(FileNotFoundError):  # another worker was faster, or it is a folder
            if not file.is_dir() and changed_at(home, file) < oldest:
                remove(home, file)
                removed += 1
    return removed


def results(home: Path) -> Path:
    """The directory in which the stages of a ``gpu`` worker leave their manifests."""
    return home / "prefect" / "results"


def api_url(port: int) -> str:
    return f"http://127.0.0.1:{port}/api"


def _quiet(home: Path) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_LOCAL_STORAGE_PATH": str(results(home)),
        # A server ends a run that missed three of them. Prefect's default is longer than those.
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLIENT_MAX_RETRIES": "7",  # four minutes, until a server that died is back
        # What Prefect's server answers while its database restarts. Without this, a stage whose
        # work was done failed when it gave its slot back.
        "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
        "PREFECT_CLI_PROMPT": "false",
        "DO_NOT_TRACK": "1",
    }
