"""A run that waits for a person: paused in Prefect, answered there or elsewhere."""

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID

import aiohttp
import asyncpg
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.flow_runs import aresume_flow_run

from babylon.core.settings import Settings
from babylon.core.types import WindowResult
from babylon.core.windows import WindowState, parse_window_id
from babylon.flows.train_window import train_window
from babylon.ops.prefect_env import PrefectApi
from babylon.ops.up.take_up import _end_dead_run
from babylon.stages import approval as waiting
from babylon.store import Store
from babylon.store.approvals import (
    Approval,
    answer_approval,
    ask_approval,
    get_approval,
    open_approvals,
)
from babylon.store.policies import champion
from babylon.store.windows import claim_window, get_window, set_state
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


async def test_the_form_counts_after_the_database_was_away_while_the_run_waited(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = asyncio.create_task(train_window(WINDOW))
    run = await paused()
    looks = 0

    async def broken_once(*asked: Any) -> Approval:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise asyncpg.ConnectionDoesNotExistError("the server restarts")
        return await get_approval(*asked)

    monkeypatch.setattr(waiting, "get_approval", broken_once)
    async with asyncio.timeout(60):
        while looks < 3:  # the stage was begun again
            await asyncio.sleep(0.1)
    await aresume_flow_run(run.id, run_input={"approve": True, "reason": "after the restart"})
    async with asyncio.timeout(30):
        result, state = await ended(running, run.id)
    assert (result.status, state) == (WindowState.DEPLOYED, "Deployed")
    assert "approved by somebody in Prefect's UI: after the restart" in result.reason


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


async def test_the_form_of_a_run_whose_worker_died_is_read_and_its_run_ends(store: Store) -> None:
    window = parse_window_id(WINDOW)
    async with get_client() as client, aiohttp.ClientSession() as http:
        url = str(client.api_url).rstrip("/")
        flow = await client.create_flow_from_name("train-window")
        state = {"type": "PAUSED", "name": "Paused"}
        parameters = {"window_id": WINDOW, "overrides": {"training": {"learning_rate": 1e-3}}}
        run = {"flow_id": str(flow), "name": WINDOW, "state": {"type": "RUNNING"}}
        run |= {"parameters": parameters}
        made = (await client._client.post("/flow_runs/", json=run)).json()
        claim = await claim_window(store, window, owner="dead:1:a", lease_s=600)
        await ask_approval(store, claim, 0, timedelta(hours=1))
        await set_state(store, claim, WindowState.COLLECTED)
        path = f"/flow_runs/{made['id']}"
        await client._client.post(f"{path}/set_state", json={"state": state, "force": True})
        answer = {"key": "paused-approve-0-response", "value": '{"approve": true, "reason": "ok"}'}
        await client._client.post(f"{path}/input", json=answer)
        row = await get_window(store, WINDOW)
        assert row is not None
        for _ in range(2):
            assert await _end_dead_run(store, http, PrefectApi(url=url), row) == parameters
        ended = await client.read_flow_run(made["id"])
        await client.delete_flow_run(made["id"])
    assert ended.state_name == "Crashed"
    assert str(await get_approval(store, 0)) == "approved by somebody in Prefect's UI: ok"
