"""GPU stages on a work pool that nobody serves: an error with a remedy, and nothing left behind."""

import asyncio
import json
from dataclasses import asdict

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectAlreadyExists
from prefect.flow_engine import run_flow_async
from prefect.states import Crashed, Pending

from babylon.blocks.form import Overrides
from babylon.core.errors import ConfigError, TrainingError
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.core.types import Artifact, Claim, Scored, SiblingOrder
from babylon.core.windows import WindowState
from babylon.flows.gpu_stage import gpu_stage
from babylon.flows.train_window import train_window
from babylon.store import Store
from babylon.store.windows import get_window
from babylon.tasks.pool import job_variables
from tests.flows.conftest import Workshop

WINDOW = "2025-11-14T09:00"


@pytest.fixture
async def idle_pool() -> None:
    """The deployment and its pool, without a worker."""
    async with get_client() as client:
        try:
            await client.create_work_pool(WorkPoolCreate(name="gpu", type="process"))
        except ObjectAlreadyExists:
            return
        flow_id = await client.create_flow(gpu_stage)
        await client.create_deployment(flow_id, "gpu-stage", work_pool_name="gpu")


async def children() -> list[FlowRun]:
    async with get_client() as client:
        runs = await client.read_flow_runs()
    return [run for run in runs if run.work_pool_name == "gpu"]


async def test_without_a_worker_the_run_ends_in_an_error_that_names_pool_and_remedy(
    played: Settings, store: Store, workshop: Workshop, idle_pool: None
) -> None:
    with pytest.raises(TrainingError, match=r"work pool 'gpu' was .* STAGE_TIMEOUT_SECONDS"):
        await train_window(WINDOW, {"prefect": {"stage_timeout_s": 5}}, placement="deployed")
    row = await get_window(store, WINDOW)
    assert row is not None and row.state == WindowState.FAILED
    assert {run.state_name for run in await children()} == {"Cancelled"}
    assert workshop.trained == []


async def test_a_run_on_the_pool_has_the_job_variables_of_the_setting(
    played: Settings, store: Store, workshop: Workshop, idle_pool: None
) -> None:
    await store.pool.execute(
        "INSERT INTO babylon.windows (window_id, minutes, epoch) VALUES ($1, 60, 20)", WINDOW
    )
    chosen = {"prefect": {"job_variables": '{"env": {"TRAIN_NODES": "2"}}'}}
    new = await cancelled_on_the_pool(chosen)
    assert [run.job_variables for run in new] == [{"env": {"TRAIN_NODES": "2"}}]


def test_job_variables_that_are_no_json_name_the_setting() -> None:
    settings = load_settings(prefect={"job_variables": "{gpus: 4}"})
    with pytest.raises(ConfigError, match=r"GPU_JOB_VARIABLES=\{gpus: 4\} is no JSON object"):
        job_variables(settings.prefect)


async def test_a_cancelled_parent_cancels_the_run_on_the_pool(
    played: Settings, store: Store, workshop: Workshop, idle_pool: None
) -> None:
    # another epoch than the other test's, because the key of a run on the pool carries it
    await store.pool.execute(
        "INSERT INTO babylon.windows (window_id, minutes, epoch) VALUES ($1, 60, 7)", WINDOW
    )
    assert [run.state_name for run in await cancelled_on_the_pool()] == ["Cancelled"]


async def cancelled_on_the_pool(overrides: Overrides | None = None) -> list[FlowRun]:
    """Cancel a run once its stage is on the pool; return the runs there."""
    before = {run.id for run in await children()}
    parent = asyncio.create_task(train_window(WINDOW, overrides, placement="deployed"))
    async with asyncio.timeout(60):
        while not {run.id for run in await children()} - before:
            assert not parent.done(), parent.exception()
            await asyncio.sleep(0.2)
        await asyncio.sleep(0.5)
        parent.cancel()
        with pytest.raises(asyncio.CancelledError):
            await parent
    return [run for run in await children() if run.id not in before]


async def test_a_run_that_begins_after_it_counted_as_crashed_refuses_its_stage(
    played: Settings, store: Store, workshop: Workshop
) -> None:
    """Its node came late: the parent has started another run under the same claim."""
    claim = Claim(window_id=WINDOW, epoch=1, owner="box:1:a")
    given = {"manifest": asdict(SiblingOrder(scored=scored_under(claim), member=0))}
    async with get_client() as client:
        run = await client.create_flow_run(gpu_stage, parameters=given)
        await client.set_flow_run_state(run.id, Pending(), force=True)
        await client.set_flow_run_state(run.id, Crashed(message="stuck"), force=True)
        run = await client.read_flow_run(run.id)
    with pytest.raises(TrainingError, match="marked as crashed before it began"):
        await run_flow_async(gpu_stage, flow_run=run, parameters=given)
    assert workshop.trained == []


def scored_under(claim: Claim) -> Scored:
    artifact = Artifact(uri="home:artifacts/x", rows=0, sha256="0" * 64, window_id=WINDOW)
    return Scored(claim=claim, artifact=artifact, eligible=1, agents=1, scorer="h", avg_reward=0.0)


async def test_on_the_pool_each_stage_is_chosen_by_its_manifest_which_is_json(
    played: Settings, store: Store, workshop: Workshop
) -> None:
    workshop.training_error = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await train_window(WINDOW)
    workshop.training_error = None
    scored = await store.pool.fetchval("SELECT scored FROM babylon.windows")
    trained = await gpu_stage(json.loads(json.dumps(scored)))
    assert (trained["policy_version"], trained["claim"]["window_id"]) == (1, WINDOW)
    verdict = await gpu_stage(json.loads(json.dumps(trained)))
    assert (verdict["promote"], verdict["policy_version"]) == (True, 1)
