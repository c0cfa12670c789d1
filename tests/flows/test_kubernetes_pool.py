"""Prefect's server takes the template of GPU jobs, and checks a deployment's variables by it."""

import json
from pathlib import Path

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import PrefectHTTPStatusError

from tests.flows.staged import staged

ROOT = Path(__file__).parents[2]
TEMPLATE = json.loads((ROOT / "deploy/kubernetes/base/gpu-job-template.json").read_text())
POOL = "on-kubernetes"


async def test_a_server_takes_the_template_and_the_variables_of_the_page() -> None:
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    stage = next(one for one in deployments if one["name"] == "gpu-stage")
    given = stage["work_pool"]["job_variables"] | {"gpus": 4, "memory": "256Gi"}
    async with get_client() as client:
        made = WorkPoolCreate(name=POOL, type="kubernetes", base_job_template=TEMPLATE)
        pool = await client.create_work_pool(made)
        assert pool.base_job_template == TEMPLATE
        flow = await client.create_flow(staged)
        found = await client.create_deployment(
            flow, "several-gpus", work_pool_name=POOL, job_variables=given
        )
        assert (await client.read_deployment(found)).job_variables == given
        with pytest.raises(PrefectHTTPStatusError, match="gpus"):
            await client.create_deployment(
                flow, "wrong", work_pool_name=POOL, job_variables={"gpus": "many"}
            )
