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
TEMPLATE = json.loads((KUBERNETES / "gpu-job-template.json").read_text())
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
@pytest.mark.parametrize("directory", ["base", "coreweave"])
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
