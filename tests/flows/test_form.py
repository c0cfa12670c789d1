"""The form of a run in Prefect's UI: made from the settings, and checked by the server."""

import asyncio
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.concurrency.asyncio import concurrency
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, temporary_settings

from babylon.blocks.form import BY_HAND, PUBLISHED, form
from babylon.core.settings import JudgeSettings
from babylon.flows.backfill import backfill
from babylon.tasks.limits import GPU_MEMORY, JUDGE, limited, limits_of_scoring
from babylon.tasks.stage import stage


def test_every_field_has_the_limits_and_the_text_of_its_setting() -> None:
    for asked in (BY_HAND, PUBLISHED):
        for group, names in asked.items():
            fields = form(asked)["properties"][group]["properties"]
            assert set(fields) == set(names)
            for field in fields.values():
                assert field["description"] and field["type"] and "default" not in field
    training = form(BY_HAND)["properties"]["training"]["properties"]
    assert training["trainer"]["enum"] == ["torch", "serverless", "art-local"]
    assert training["learning_rate"]["exclusiveMinimum"] == 0


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"overrides": {"windows": {"min_agents": 1}}}, "min_agents"),
        ({"overrides": {"windows": {"min_agent": 5}}}, "min_agent"),
        ({"overrides": {"database": {"url": "postgresql://x/y"}}}, "database"),
        ({"overrides": {"training": {"loss": "ppo"}}}, "loss"),
        ({"hours": 0}, "hours"),
        ({"first": "yesterday"}, "first"),
    ],
)
async def test_the_server_refuses_a_bad_value_and_names_its_field(
    parameters: dict[str, object], named: str
) -> None:
    async with get_client() as client:
        flow_id = await client.create_flow(backfill)
        deployment = await client.create_deployment(
            flow_id,
            "form",
            parameter_openapi_schema=backfill.parameters.model_dump(),
            enforce_parameter_schema=True,
        )
        fine = {"overrides": {"windows": {"min_agents": 2}}, "first": "2025-11-14", "hours": 3}
        await client.create_flow_run_from_deployment(deployment, parameters=fine)
        with pytest.raises(PrefectHTTPStatusError, match="409") as refused:
            await client.create_flow_run_from_deployment(deployment, parameters=parameters)
    assert named in refused.value.response.text


def test_a_judge_on_this_machine_shares_the_gpu_and_a_heuristic_needs_no_slot() -> None:
    judge, local = JudgeSettings(model="gpt"), JudgeSettings(model_path="/judge")
    assert limits_of_scoring("heuristic", judge) == ()
    assert limits_of_scoring("ruler", judge) == (JUDGE,)
    assert limits_of_scoring("art-ruler", judge) == (JUDGE,)
    assert limits_of_scoring("ruler", local) == (GPU_MEMORY,)


def test_a_panel_holds_the_slots_of_all_its_judges(tmp_path: Path) -> None:
    mixed = JudgeSettings(model="gpt", panel=f"other,{tmp_path}")
    assert set(limits_of_scoring("ruler", mixed)) == {JUDGE, GPU_MEMORY}
    assert limits_of_scoring("art-ruler", mixed) == (JUDGE,)
    turned = JudgeSettings(model_path="/judge", panel="gpt")
    assert set(limits_of_scoring("ruler", turned)) == {JUDGE, GPU_MEMORY}
    local = JudgeSettings(model_path="/judge", panel=str(tmp_path))
    assert limits_of_scoring("ruler", local) == (GPU_MEMORY,)
    assert limits_of_scoring("heuristic", mixed) == ()


# Prefect keeps the client of a limit as long as the process lives, whatever server it was for.
LIMIT = "of-this-test"


async def test_a_stage_waits_for_its_slot() -> None:
    entered = asyncio.Event()

    @stage("greedy")
    async def greedy() -> None:
        async with limited(LIMIT):
            entered.set()

    async with get_client() as client:
        await client.upsert_global_concurrency_limit_by_name(LIMIT, 1)
        address = str(client.api_url)
    with temporary_settings({PREFECT_API_URL: address}):
        async with concurrency(LIMIT):
            waiting = asyncio.create_task(greedy())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(entered.wait()), 1.5)
        await waiting
    assert entered.is_set()
    async with get_client() as client:
        await client.delete_global_concurrency_limit_by_name(LIMIT)
