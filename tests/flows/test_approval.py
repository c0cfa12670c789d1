"""A run that waits for a person: paused in Prefect, answered there or elsewhere."""

import asyncio
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.flow_runs import aresume_flow_run

from babylon.core.settings import Settings
from babylon.core.types import WindowResult
from babylon.core.windows import WindowState
from babylon.flows.train_window import train_window
from babylon.stages import approval as waiting
from babylon.store import Store
from babylon.store.approvals import answer_approval, get_approval, open_approvals
from babylon.store.policies import champion
from babylon.tasks import approval
from tests.flows.conftest import Workshop

WINDOW = "2025-11-14T09:00"
PAUSED = FlowRunFilter(
    state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PAUSED]))
)


@pytest.fixture(autouse=True)
def asked(played: Settings, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPROVAL_HOURS", "1")
    monkeypatch.setattr(waiting, "POLL_S", 0.1)
    monkeypatch.setattr(approval, "_POLL_S", 0.1)


async def paused() -> FlowRun:
    async with get_client() as client, asyncio.timeout(60):
        while not (runs := await client.read_flow_runs(flow_run_filter=PAUSED)):
            await asyncio.sleep(0.1)
    (run,) = runs
    return run


async def ended(running: "asyncio.Task[WindowResult]", run: UUID) -> tuple[WindowResult, str]:
    """The result, and the name of the run's state in Prefect."""
    result = await running
    async with get_client() as client:
        state = (await client.read_flow_run(run)).state
    assert state is not None and state.name is not None
    return result, state.name


async def test_an_answer_from_elsewhere_resumes_the_run(store: Store) -> None:
    running = asyncio.create_task(train_window(WINDOW))
    run = await paused()
    assert (await champion(store))[0].policy_version == 0
    await answer_approval(store, 1, True, "alice", "looks fine")
    result, state = await ended(running, run.id)
    assert (result.status, state) == (WindowState.DEPLOYED, "Deployed")
    assert result.reason == "not worse; approved by alice: looks fine"
    assert (await champion(store))[0].policy_version == 1


async def test_the_form_in_prefect_is_an_answer(store: Store) -> None:
    running = asyncio.create_task(train_window(WINDOW))
    run = await paused()
    await aresume_flow_run(run.id, run_input={"approve": False, "reason": "on a Friday?"})
    result, state = await ended(running, run.id)
    assert (result.status, state) == (WindowState.REJECTED, "Rejected")
    assert (await get_approval(store, 1)).author == approval.IN_PREFECT
    assert "refused by somebody in Prefect's UI: on a Friday?" in result.reason
    assert (await champion(store))[0].policy_version == 0


async def test_a_run_that_stops_while_it_waits_leaves_the_question_to_the_next(
    store: Store, workshop: Workshop
) -> None:
    stopped = asyncio.create_task(train_window(WINDOW))
    run = await paused()
    stopped.cancel()
    await asyncio.gather(stopped, return_exceptions=True)
    async with get_client() as client:
        await client.delete_flow_run(run.id)
    await answer_approval(store, 1, True, "alice", "")
    result = await train_window(WINDOW)
    assert result.status == WindowState.DEPLOYED
    assert workshop.trained == [WINDOW]  # not a second time


async def test_a_change_of_the_champion_while_a_run_waits_trains_the_window_again(
    store: Store, workshop: Workshop
) -> None:
    running = asyncio.create_task(train_window(WINDOW))
    run = await paused()
    await store.pool.execute(
        "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri, base_model)"
        " VALUES (2, 0, 'lora', '/nowhere', 'tiny');"
        "INSERT INTO babylon.routes (route_version, policy_version, author, reason)"
        " VALUES (2, 2, 'alice', 'by hand')"
    )
    async with asyncio.timeout(60):
        while [one.policy_version for one in await open_approvals(store)] != [3]:
            await asyncio.sleep(0.1)
    assert (await paused()).id == run.id
    await answer_approval(store, 3, True, "alice", "")
    result, state = await ended(running, run.id)
    assert (result.status, state) == (WindowState.DEPLOYED, "Deployed")
    assert (await champion(store))[0].policy_version == 3
    assert workshop.trained == [WINDOW, WINDOW]
