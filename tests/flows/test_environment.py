"""The Prefect server that an inline flow reports to, seen from a fresh interpreter."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import psutil

from babylon.core.processes import Processes, ProcessRecord
from babylon.ops.prefect_env import SERVER, api_url
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
ASK = """
import os
from babylon.cli.flow_runs import prepare_prefect
from babylon.core.settings_loading import load_settings
prepare_prefect(load_settings().home, load_settings().prefect)
print(os.environ.get("PREFECT_API_URL"))
"""
# Prefect itself makes its directory; a PREFECT_HOME elsewhere shows that nothing else is made.
IMPORT = """
import os, socket
socket.socket.connect = socket.create_connection = None
before = set(os.environ)
import babylon.flows.backfill, babylon.flows.continuous, babylon.flows.publish_dataset
print(*(name for name in set(os.environ) - before if name.startswith("PREFECT")))
"""


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/api/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""


@contextmanager
def healthy() -> Iterator[int]:
    """The port of a server that answers as Prefect's does."""
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        Thread(target=server.serve_forever).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


def python(code: str, **environment: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return finished.stdout.strip()


def api_with(home: Path, port: int, **given: str) -> str:
    """The API of a flow where ``babylon up`` has recorded a live server on that port."""
    processes = Processes(home=home)
    created = psutil.Process().create_time()
    record = ProcessRecord(name=SERVER, pid=os.getpid(), created=created, port=port)
    processes.directory.mkdir(parents=True, exist_ok=True)
    (processes.directory / f"{SERVER}.json").write_bytes(msgspec.json.encode(record))
    return python(ASK, BABYLON_HOME=str(home), **given)


def test_a_recorded_server_is_used_once_it_answers(tmp_path: Path) -> None:
    with healthy() as port:
        assert api_with(tmp_path, port) == api_url(port)
        assert api_with(tmp_path, port, PREFECT_API_URL="http://x/api") == "http://x/api"
    assert api_with(tmp_path, free_port()) == "None"


def test_importing_the_flows_makes_no_directory_no_request_and_sets_nothing(tmp_path: Path) -> None:
    environment = {f"{name}_HOME": str(tmp_path / name.lower()) for name in ("BABYLON", "PREFECT")}
    assert python(IMPORT, **environment) == ""
    assert not (tmp_path / "babylon").exists()
