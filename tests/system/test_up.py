"""``babylon up`` for real: server, two workers, engine and gateway, one run of a deployment."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from babylon.ops.prefect_env import PrefectApi
from babylon.tasks.limits import GPU_MEMORY, JUDGE
from tests.ports import free_port
from tests.tiny_policy import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
WINDOW = "2025-11-14T09:00"
RUN_S = 420  # about 25 s on an idle machine
FINAL_STATES = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
SERVICES = {"database", "supervisor", "prefect-server", "worker-cpu", "worker-gpu", "serving"}


class System:
    """One home, its ports, and the command line that runs it."""

    def __init__(self, home: Path, base_model: Path) -> None:
        self.home = home
        self.prefect_port, self.gateway_port = free_port(), free_port()
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        self.environment = inherited | {
            "BABYLON_HOME": str(home),
            "BASE_MODEL": str(base_model),
            "PREFECT_SERVER_API_PORT": str(self.prefect_port),
            "LOCAL_ENDPOINT": f"http://127.0.0.1:{self.gateway_port}",
            "ENGINE_PORT": str(free_port()),
            "ADMIN_PORT": str(free_port()),
        }
        self.environment.pop("DATABASE_URL", None)

    def run(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        finished = subprocess.run(
            [sys.executable, "-m", "babylon", *arguments, "--json"],
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=900,  # the machine may be busy
        )
        return finished.returncode, json.loads(finished.stdout)

    def run_deployment(self, name: str, overrides: dict[str, Any]) -> str:
        """Start it as a person would, and wait for its end; returns the name of its last state."""
        parameter = f"overrides={json.dumps(overrides)}"
        finished = subprocess.run(
            [sys.executable, "-m", "prefect", "deployment", "run", name, "--param", parameter],
            env=self.environment
            | {"PREFECT_API_URL": self.api, "PREFECT_API_AUTH_STRING": self.auth},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        run = re.search(r"UUID: (\S+)", finished.stdout)
        assert run, finished.stdout
        # Not `--watch`: it follows an event stream, and waits for ever when that falls silent.
        deadline = time.monotonic() + RUN_S
        while (state := self.get(f"flow_runs/{run[1]}")["state"])["type"] not in FINAL_STATES:
            if time.monotonic() > deadline:
                pytest.fail(f"{name} is still {state} after {RUN_S} s\n{self.evidence()}")
            time.sleep(1)
        assert state["type"] == "COMPLETED", f"{state}\n{self.evidence()}"
        return str(state["name"])

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.prefect_port}/api"

    @property
    def auth(self) -> str:
        return (self.home / "prefect.key").read_text().strip()

    def get(self, path: str, body: object = None) -> Any:
        """Return the answer of Prefect's API to its password. A body makes it a POST."""
        request = urllib.request.Request(
            f"{self.api}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"}
            | PrefectApi(url=self.api, auth=self.auth).headers,
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def names(self, path: str) -> set[str]:
        """Names or slugs of what the server has."""
        return {one.get("slug") or one["name"] for one in self.get(path, body={})}

    def evidence(self) -> str:
        """Processes and logs, for a failed run."""
        processes = [
            f"{p.pid} {p.info['status']} {' '.join(p.info['cmdline'] or [])[:200]}"
            for p in psutil.process_iter(["status", "cmdline"])
        ]
        logs = [
            f"== {path.name}\n{path.read_text(errors='replace')[-4000:]}"
            for path in sorted((self.home / "logs").glob("*.log"))
        ]
        return "\n".join([*processes, *logs])


def _same(status: dict[str, Any], services: dict[str, Any]) -> set[str]:
    """Names of the services whose process is the same."""
    return {one["name"] for one in status["services"] if one["pid"] == services[one["name"]]["pid"]}


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    base = tmp_path / "base"
    tiny_model(seed=0, max_position_embeddings=8192).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    system = System(tmp_path / "home", base)
    yield system
    system.run("down")


def test_up_serves_runs_a_deployment_and_goes_down_without_a_trace(system: System) -> None:
    code, started = system.run("up")
    services = {service["name"]: service for service in started["services"]}
    assert (code, set(services)) == (0, SERVICES)
    assert all(service["healthy"] for service in services.values())
    assert system.run("up") == (0, started)  # again: nothing is started twice
    assert system.names("block_types/filter") >= {"babylon-database", "babylon-model"}
    assert system.names("v2/concurrency_limits/filter") >= {GPU_MEMORY, JUDGE}
    with pytest.raises(urllib.error.HTTPError, match="401"):  # without the password
        urllib.request.urlopen(f"{system.api}/flow_runs/filter", data=b"{}", timeout=60)
    form = system.get("deployments/name/backfill/hourly-training")
    with pytest.raises(urllib.error.HTTPError, match="409"):
        misspelt = {"parameters": {"overrides": {"training": {"iteration": 1}}}}
        system.get(f"deployments/{form['id']}/create_flow_run", body=misspelt)

    files = [str(path) for path in sorted((ROOT / "tests/data/babylon").glob("*.jsonl"))]
    assert system.run("db", "import", *files)[0] == 0
    overrides = {
        "training": {"iterations": 1},
        "evaluation": {"scenarios": 32},
        "windows": {"lookback_hours": 876_000},
    }
    assert system.run_deployment("backfill/hourly-training", overrides) == "Completed"
    (window,) = system.run("windows", "list")[1]["windows"]
    assert (window["window_id"], window["state"] in ("deployed", "rejected")) == (WINDOW, True)

    killed = {"supervisor", "prefect-server", "worker-gpu", "serving"}
    for name in killed:
        os.kill(services[name]["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 300
    while (found := system.run("status"))[0] != 0 or killed & _same(found[1], services):
        assert time.monotonic() < deadline, found
        time.sleep(0.5)
    assert found[1]["work"] == []
    services = {service["name"]: service for service in found[1]["services"]}

    system.environment |= {"MIN_AGENTS_PER_WINDOW": "7", "AWS_REGION": "elsewhere"}
    code, report = system.run("up")
    assert (code, report["changed"]) == (1, ["AWS_REGION", "MIN_AGENTS_PER_WINDOW"])
    code, report = system.run("up", "--apply")
    assert (code, report["changed"]) == (0, [])
    assert all(service["healthy"] for service in report["services"])
    assert _same(report, services) <= {"database"}
    services |= {f"{service['name']} again": service for service in report["services"]}

    code, stopped = system.run("down")
    assert (code, set(stopped["stopped"])) == (0, SERVICES - {"database"})
    assert not any(psutil.pid_exists(s["pid"]) for s in services.values() if s["pid"])
    assert system.run("status")[0] == 1


def test_a_busy_port_is_named_and_nothing_is_left_running(system: System) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", system.gateway_port))
        squatter.listen()
        code, report = system.run("up")
    assert code == 1
    assert f"port {system.gateway_port}" in report["error"]
    assert "LOCAL_ENDPOINT" in report["error"]
    assert not any(service["running"] for service in system.run("status")[1]["services"])
