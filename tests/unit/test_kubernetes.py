"""The manifests of deploy/kubernetes, built by kubectl and checked against Kubernetes' schemas.

The schemas are large, so they are an extra: ``pip install '.[kubernetes]'``.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.templating import apply_values, find_placeholders

kubernetes_validate = pytest.importorskip("kubernetes_validate")
ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
TEMPLATE = json.loads((KUBERNETES / "base" / "gpu-job-template.json").read_text())
needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")


def built(directory: str) -> list[dict[str, Any]]:
    command = ["kubectl", "kustomize", str(KUBERNETES / directory)]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(made.stdout))


def valid(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def named(manifests: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    return next(m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name))


@needs_kubectl
@pytest.mark.parametrize("directory", ["base", "coreweave", "by-calls"])
def test_every_manifest_is_valid_and_every_pod_is_locked(directory: str) -> None:
    manifests = built(directory)
    for manifest in manifests:
        valid(manifest)
    pods = [m["spec"]["template"] for m in manifests if "template" in m.get("spec", {})]
    assert len(pods) == 5
    for pod in pods:
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        for container in pod["spec"]["containers"]:
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            assert container["resources"]["requests"] and container["resources"]["limits"]
            assert ":" in container["image"], "no image without a version"
    assert not [m for m in manifests if m["kind"] == "Secret"]


@needs_kubectl
def test_selectors_meet_their_pods() -> None:
    manifests = built("base")
    labels = [
        m["spec"]["template"]["metadata"]["labels"]
        for m in manifests
        if "template" in m.get("spec", {})
    ]
    labels.append(
        TEMPLATE["job_configuration"]["job_manifest"]["spec"]["template"]["metadata"]["labels"]
    )
    for manifest in manifests:
        spec = manifest.get("spec", {})
        wanted = spec.get("podSelector", spec.get("selector", {})) if spec else {}
        wanted = wanted.get("matchLabels", wanted)
        assert any(wanted.items() <= one.items() for one in labels), manifest["metadata"]["name"]
    scaled = named(manifests, "HorizontalPodAutoscaler", "gateway")["spec"]["scaleTargetRef"]
    named(manifests, scaled["kind"], scaled["name"])


@needs_kubectl
def test_each_pod_has_the_secrets_that_it_needs_and_no_others() -> None:
    pods = {
        m["metadata"]["name"]: m["spec"]["template"]["spec"]
        for m in built("base")
        if "template" in m.get("spec", {})
    }
    pods["gpu-stage"] = TEMPLATE["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    given = {
        name: {
            one["secretRef"]["name"]
            for one in pod["containers"][0]["envFrom"]
            if "secretRef" in one
        }
        for name, pod in pods.items()
    }
    assert given == {
        "prefect": {"prefect-server"},
        "prepare": {"babylon", "babylon-prefect"},
        "worker-cpu": {"babylon", "babylon-prefect"},
        "worker-gpu": {"babylon-prefect"},
        "gpu-stage": {"babylon", "babylon-prefect"},
        "gateway": {"babylon"},  # a caller of Prefect can run code
    }
    made = {
        path.name.removesuffix(".secret.example")
        for path in (KUBERNETES / "base").glob("*.secret.example")
    }
    assert made == set().union(*given.values())


@needs_kubectl
def test_callers_of_prefect_may_reach_it_and_gateways_may_not() -> None:
    manifests = built("base")
    (rule,) = named(manifests, "NetworkPolicy", "runs")["spec"]["ingress"]
    (callers,) = rule["from"][0]["podSelector"]["matchExpressions"]
    assert {*callers["values"]} == {"prepare", "worker-cpu", "worker-gpu", "gpu-stage"}


@needs_kubectl
def test_the_first_job_makes_the_pool_before_any_worker_can() -> None:
    spec = named(built("base"), "Job", "prepare")["spec"]["template"]["spec"]
    command = spec["containers"][0]["command"][-1]
    assert command.index("prefect work-pool create gpu") < command.index("babylon db migrate")
    mount = next(m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "template")
    assert f"{mount['mountPath']}/gpu-job-template.json" in command
    made = named(built("base"), "ConfigMap", "gpu-job-template")["data"]
    assert json.loads(made["gpu-job-template.json"]) == TEMPLATE


def test_the_job_of_a_gpu_stage_is_valid_with_the_variables_of_its_deployment() -> None:
    variables = TEMPLATE["variables"]["properties"]
    wanted = {place.name for place in find_placeholders(TEMPLATE["job_configuration"])}
    assert wanted <= variables.keys()
    stage = next(
        one
        for one in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
        if one["name"] == "gpu-stage"
    )
    values = {name: one["default"] for name, one in variables.items() if "default" in one}
    values |= {"gpus": 4, "command": ["prefect", "flow-run", "execute"], "labels": {}}
    environment = stage["work_pool"]["job_variables"]["env"]
    values["env"] = [{"name": name, "value": value} for name, value in environment.items()]
    job = apply_values(TEMPLATE["job_configuration"]["job_manifest"], values)
    valid(job)
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert container["args"][0] == "prefect"
