"""The two stages that want a GPU, as a flow of its own.

``placement="inline"`` calls it as an ordinary subflow. ``"deployed"`` starts its deployment on the
``gpu`` work pool and waits, so only small JSON manifests cross between the two machines.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import httpx
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import arun_deployment
from prefect.runtime import flow_run
from prefect.states import Cancelling
from pydantic import TypeAdapter

from babylon.blocks.load import settings_with
from babylon.core.errors import TrainingError
from babylon.core.types import Scored, Trained, Verdict
from babylon.tasks.train import train
from babylon.tasks.validate_checkpoint import validate_checkpoint

Placement = Literal["inline", "deployed"]
DEPLOYMENT = "gpu-stages/gpu-stages"
POLL_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A trained policy and what its validation said."""

    trained: Trained
    verdict: Verdict


_candidate = TypeAdapter(Candidate)


@flow(name="gpu-stages", flow_run_name="{scored.claim.window_id}", result_serializer="json")
async def gpu_stages(
    scored: Scored,
    trained: Trained | None = None,
    overrides: dict[str, Any] | None = None,
    blocks: Sequence[str] = (),
) -> dict[str, Any]:
    """Train, unless an earlier run of the window did (``trained``), then validate the checkpoint.

    Returns a ``Candidate`` as JSON, because a result read in another process is data.
    """
    settings = await settings_with(overrides, blocks)
    if trained is None:
        trained = await train(settings, scored)
    verdict = await validate_checkpoint(settings, trained)
    result: dict[str, Any] = _candidate.dump_python(
        Candidate(trained=trained, verdict=verdict), mode="json"
    )
    return result


async def on_gpu(
    scored: Scored,
    trained: Trained | None,
    overrides: dict[str, Any] | None,
    blocks: Sequence[str],
    placement: Placement,
) -> Candidate:
    """Run ``gpu_stages`` here or on the ``gpu`` pool.

    The idempotency key joins a second start of the same attempt to the first one's run; a new
    epoch or attempt gets a run of its own, because a key would also return an old failure.

    Raises:
        TrainingError: the run on the pool was not over within ``gpu_timeout_s``.
    """
    if placement == "inline":
        return _candidate.validate_python(await gpu_stages(scored, trained, overrides, blocks))
    parameters = TypeAdapter(dict[str, Any]).dump_python(
        {"scored": scored, "trained": trained, "overrides": overrides, "blocks": list(blocks)},
        mode="json",
    )
    claim = scored.claim
    run = await arun_deployment(
        DEPLOYMENT,
        parameters=parameters,
        timeout=0,  # at once: who waits must know the run, to cancel it
        idempotency_key=f"{flow_run.id}/{claim.window_id}/{claim.epoch}/{flow_run.run_count or 1}",
    )
    settings = await settings_with(overrides, blocks)
    run = await _finished(run, settings.prefect.gpu_timeout_s)
    assert run.state is not None  # it is final
    return _candidate.validate_python(await run.state.aresult())


async def _finished(run: FlowRun, timeout_s: float) -> FlowRun:
    """Wait for a run to end; cancel it when that takes too long or the caller is cancelled."""
    async with get_client() as client:
        try:
            async with asyncio.timeout(timeout_s):
                while not (run.state and run.state.is_final()):
                    await asyncio.sleep(POLL_S)
                    run = await client.read_flow_run(run.id)
                return run
        except (TimeoutError, asyncio.CancelledError) as error:
            with suppress(httpx.HTTPError):  # a server that is away must not hide the reason
                await client.set_flow_run_state(run.id, Cancelling())
            if isinstance(error, asyncio.CancelledError):
                raise
            raise TrainingError(
                f"flow run {run.name} ({run.id}) on work pool {run.work_pool_name!r} was"
                f" {run.state_name} after {timeout_s:g} s and is cancelled: start a worker of that"
                " pool (`babylon up` does), or raise GPU_TIMEOUT_SECONDS"
            ) from error
