"""The variables of Prefect in deploy/kubernetes, compared with those that ``babylon up`` sets."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from babylon.core.home import Home
from babylon.ops.prefect_env import PrefectApi, served_environment
from babylon.ops.up.prefect_setup import STALE_RUNS

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


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((BASE / name).read_text()))


def pods() -> dict[str, dict[str, Any]]:
    """Name → first container of each pod that the base makes, that of the GPU's job included."""
    found = {}
    for path in BASE.glob("*.yaml"):
        for manifest in manifests(path.name):
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


def test_the_leases_of_slots_outlive_the_pod_of_the_server() -> None:
    claim, server = (
        next(one for one in manifests("prefect.yaml") if one["kind"] == kind)
        for kind in ("PersistentVolumeClaim", "Deployment")
    )
    assert server["spec"]["strategy"] == {"type": "Recreate"}
    spec = server["spec"]["template"]["spec"]
    (volume,) = (
        one["name"]
        for one in spec["volumes"]
        if one.get("persistentVolumeClaim") == {"claimName": claim["metadata"]["name"]}
    )
    (container,) = spec["containers"]
    # Prefect keeps the files of its leases in its home.
    home = next(one["value"] for one in container["env"] if one["name"] == "PREFECT_HOME")
    assert {"name": volume, "mountPath": home} in container["volumeMounts"]


def test_a_server_of_ones_own_keeps_slots_and_removes_old_runs_as_that_of_up_does(
    served: dict[str, str],
) -> None:
    wanted = {name: value for name, value in served.items() if name.startswith(SERVER)}
    assert {f"{SERVER}CONCURRENCY_LEASE_STORAGE", f"{SERVER}SERVICES_DB_VACUUM_ENABLED"} < {*wanted}
    given = {one["name"]: one["value"] for one in pods()["prefect"]["env"]}
    del wanted[f"{SERVER}UI_STATIC_DIRECTORY"]
    assert given[f"{SERVER}UI_STATIC_DIRECTORY"].startswith("/tmp/")  # the image is read-only
    assert {name: given.get(name) for name in wanted} == wanted
    page = (BASE.parents[2] / "docs" / "scale.md").read_text().split()
    assert [name for name, value in wanted.items() if f"{name}={value}" not in page] == []


def test_a_node_has_as_long_to_come_as_a_run_may_be_pending() -> None:
    template = json.loads((BASE / "gpu-job-template.json").read_text())
    given = template["variables"]["properties"]["pod_watch_timeout_seconds"]["default"]
    assert given == STALE_RUNS["babylon: crash runs stuck in pending"][2]


def test_a_base_model_of_the_hub_is_fetched_to_a_volume() -> None:
    """The file systems of the images are read-only, and by default the hub's cache is in one."""
    text = (BASE.parents[1] / "images" / "Containerfile").read_text()
    caches = re.findall(r"\bHF_HOME=(\S+)", text)
    assert len(caches) == text.count("BABYLON_HOME=") == 2
    assert "/" in variables()["BASE_MODEL"]  # of the hub
    for name, container in pods().items():
        if {"secretRef": {"name": "babylon"}} in container["envFrom"]:  # it may load a model
            places = [one["mountPath"] for one in container["volumeMounts"]]
            for cache in caches:
                assert any(cache.startswith(f"{place}/") for place in places), name
