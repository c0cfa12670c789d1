"""The variables of Prefect in deploy/kubernetes, compared with those that ``babylon up`` sets."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from babylon.core.home import Home
from babylon.ops.prefect_env import PrefectApi, served_environment

BASE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base"
SERVER = "PREFECT_SERVER_"
# Each pod has places of its own. The image names Python's path.
PLACES = {"PREFECT_HOME", "PREFECT_LOCAL_STORAGE_PATH"}
# Of the pods that run flows, or start those that do.
IN_RUNS = ("worker-cpu", "worker-gpu", "gpu-stage")


@pytest.fixture
def served(tmp_path: Path) -> dict[str, str]:
    """What Babylon's own server and workers get with an object store, apart from their API."""
    home = Home(root=tmp_path, store="s3://bucket/prefix")
    api = PrefectApi(url="http://prefect:4200/api", embedded=False)
    found = served_environment(home, api, {})
    return {name: value for name, value in found.items() if name not in {*PLACES, *api.environment}}


def variables() -> dict[str, str]:
    lines = (BASE / "babylon.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def pods() -> dict[str, dict[str, Any]]:
    """Name → first container of each pod that the base makes, that of the GPU's job included."""
    found = {}
    for path in BASE.glob("*.yaml"):
        for manifest in yaml.safe_load_all(path.read_text()):
            if "template" in manifest.get("spec", {}):
                pod = manifest["spec"]["template"]["spec"]
                found[manifest["metadata"]["name"]] = pod["containers"][0]
    job = json.loads((BASE / "gpu-job-template.json").read_text())["job_configuration"]
    pod = job["job_manifest"]["spec"]["template"]["spec"]
    return found | {"gpu-stage": pod["containers"][0]}


def test_runs_of_prefects_own_worker_get_what_those_of_babylon_get(served: dict[str, str]) -> None:
    wanted = {name: value for name, value in served.items() if not name.startswith(SERVER)}
    assert "PREFECT_RESULTS_DEFAULT_STORAGE_BLOCK" in wanted
    given = variables()
    assert {name: given.get(name) for name in wanted} == wanted
    containers = pods()
    for name in IN_RUNS:
        assert {"configMapRef": {"name": "babylon"}} in containers[name]["envFrom"], name
