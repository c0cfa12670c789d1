"""Which Prefect server an inline flow reports to, seen from a fresh interpreter."""

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
ASK = "import os, flows; print(os.environ.get('PREFECT_API_URL'))"


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


def api_with(home: Path, port: int, **given: str) -> str:
    """What a flow is told where ``babylon up`` has recorded a live server on that port."""
    processes = Processes(home=home)
    record = ProcessRecord(
        name=SERVER, pid=os.getpid(), created=psutil.Process().create_time(), port=port
    )
    processes.directory.mkdir(parents=True, exist_ok=True)
    (processes.directory / f"{SERVER}.json").write_bytes(msgspec.json.encode(record))
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    finished = subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=ROOT,
        env=inherited | {"BABYLON_HOME": str(home)} | given,
        capture_output=True,
        text=True,
        check=True,
    )
    return finished.stdout.strip()


def test_a_recorded_server_is_used_once_it_answers(tmp_path: Path) -> None:
    with healthy() as port:
        assert api_with(tmp_path, port) == api_url(port)
        assert api_with(tmp_path, port, PREFECT_API_URL="http://x/api") == "http://x/api"
    assert api_with(tmp_path, free_port()) == "None"
