"""A stage on another work pool: start its deployment, wait for its end, read its manifest."""

import asyncio
import logging
import time
from contextlib import suppress
from typing import TypeVar
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import arun_deployment
from prefect.runtime import flow_run
from prefect.states import Cancelling
from pydantic import TypeAdapter

import babylon.blocks.results  # noqa: F401 - Prefect finds the block that holds results by its class
from babylon.core.errors import ConfigError, TrainingError
from babylon.core.settings import PrefectSettings
from babylon.core.types import Claim
from babylon.ops.pages.stage_lines import stage_lines
from babylon.tasks.progress import LINE_S, announce

DEPLOYMENT = "gpu-stage/gpu-stage"
POLL_S = 2.0
CRASHES = 2  # of workers, in one stage
M = TypeVar("M")
log = logging.getLogger("babylon.flows")


async def on_pool(
    stage: str, parameters: dict[str, object], claim: Claim, prefect: PrefectSettings
) -> object:
    """Run the deployment ``gpu-stage`` and return its manifest as JSON.

    If the machine of its worker dies, another worker of the pool takes the stage up, where the
    stored progress left it.

    Raises:
        TrainingError: the run did not end within ``STAGE_TIMEOUT_SECONDS``.
    """
    crashes = 0
    while True:
        run = await _run(stage, parameters, f"{claim.window_id}/{claim.epoch}/{crashes}", prefect)
        state = run.state
        assert state is not None  # it is final
        if not state.is_crashed() or crashes == CRASHES:
            return await state.aresult()
        crashes += 1
        log.warning("%s: flow run %s crashed, starting another: %s", stage, run.id, state.message)


async def _run(
    stage: str, parameters: dict[str, object], attempt: str, prefect: PrefectSettings
) -> FlowRun:
    """Run the deployment once.

    The idempotency key joins a second start of the same attempt to the run of the first. It
    names epoch and attempt, because a key without them would return an earlier failure.
    """
    run = await arun_deployment(
        DEPLOYMENT,
        parameters=TypeAdapter(dict[str, object]).dump_python(parameters, mode="json"),
        timeout=0,  # returns at once, because the run must be known to be cancelled
        idempotency_key=f"{flow_run.id}/{stage}/{attempt}/{flow_run.run_count or 1}",
        tags=[stage],
        job_variables=job_variables(prefect),
    )
    announce(stage)
    log.info("%s: runs on work pool %s as flow run %s", stage, run.work_pool_name, run.id)
    return await _finished(stage, run, prefect.stage_timeout_s)


async def refuse_if_crashed() -> None:
    """Refuse a run that was marked as crashed before it began, as on a node that came late.

    Its parent has started another run under the same claim, and Prefect would run both.

    Raises:
        TrainingError: this run was marked as crashed.
    """
    if flow_run.id is None:
        return
    async with get_client() as client:
        states = await client.read_flow_run_states(UUID(flow_run.id))
    if any(state.is_crashed() for state in states):
        raise TrainingError(
            f"flow run {flow_run.id} was marked as crashed before it began, so another run may have"
            " its stage: start the run of its window again"
        )


def job_variables(prefect: PrefectSettings) -> dict[str, object]:
    """The job variables that runs of GPU stages add to those of their deployment.

    Raises:
        ConfigError: the setting is not JSON.
    """
    try:
        return TypeAdapter(dict[str, object]).validate_json(prefect.job_variables)
    except ValueError as error:
        raise ConfigError(
            f"GPU_JOB_VARIABLES={prefect.job_variables} is no JSON object: correct it, as in"
            " GPU_JOB_VARIABLES='{\"gpus\": 4}'"
        ) from error


def said(stage: str, kind: type[M], manifest: object) -> M:
    """Read a manifest, and log in this run too what the stage found."""
    found = TypeAdapter(kind).validate_python(manifest)
    for line in stage_lines(found):
        log.info("%s: %s", stage, line)
    return found


async def _finished(stage: str, run: FlowRun, timeout_s: float) -> FlowRun:
    """Wait until a run ends. Cancel it on timeout, or when the caller is cancelled."""
    began = last = time.monotonic()
    async with get_client() as client:
        try:
            async with asyncio.timeout(timeout_s):
                while not (run.state and run.state.is_final()):
                    await asyncio.sleep(POLL_S)
                    if time.monotonic() - last >= LINE_S:
                        last = time.monotonic()
                        spent = f"{stage}: {run.state_name} since {last - began:.0f} s"
                        log.info("%s", spent, extra={"progress": True})
                    with suppress(httpx.HTTPError):  # a server that restarts costs only a wait
                        run = await client.read_flow_run(run.id)
                return run
        except (TimeoutError, asyncio.CancelledError) as error:
            with suppress(httpx.HTTPError):  # an unreachable server must not hide the reason
                await client.set_flow_run_state(run.id, Cancelling())
            if isinstance(error, asyncio.CancelledError):
                raise
            raise TrainingError(
                f"flow run {run.name} ({run.id}) on work pool {run.work_pool_name!r} was"
                f" {run.state_name} after {timeout_s:g} s and is cancelled: start a worker of that"
                " pool (`babylon up` does), or raise STAGE_TIMEOUT_SECONDS"
            ) from error
