"""A run that another run called, in its process: it ends in Prefect when the caller has ended."""

from datetime import timedelta

import aiohttp
import pytest
from prefect import get_client
from prefect.client.orchestration import PrefectClient

from babylon.ops.prefect_env import PrefectApi
from babylon.ops.up import runs


async def _run(client: PrefectClient, **about: object) -> str:
    flow = await client.create_flow_from_name("train-window")
    asked = {"flow_id": str(flow), "state": {"type": "RUNNING"}, **about}
    answer = await client._client.post("/flow_runs/", json=asked)
    return str(answer.json()["id"])


async def _called(client: PrefectClient, caller: str) -> str:
    task = {"flow_run_id": caller, "task_key": "train-window", "dynamic_key": "0"}
    answer = await client._client.post("/task_runs/", json=task)
    return await _run(client, parent_task_run_id=answer.json()["id"])


async def test_the_subflow_of_a_dead_run_ends_and_that_of_a_living_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "UNSEEN", timedelta(0))
    async with get_client() as client, aiohttp.ClientSession() as http:
        callers = [await _run(client) for _ in range(2)]
        children = [await _called(client, caller) for caller in callers]
        crashed = {"state": {"type": "CRASHED"}, "force": True}
        await client._client.post(f"/flow_runs/{callers[0]}/set_state", json=crashed)
        await runs.end_dead_runs(http, PrefectApi(url=str(client.api_url).rstrip("/")))
        states = [(await client.read_flow_run(child)).state_name for child in children]
        for run in [*children, *callers]:
            await client.delete_flow_run(run)
    assert states == ["Crashed", "Running"]
