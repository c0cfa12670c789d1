"""Training and checkpoint validation, in this process or on the ``gpu`` work pool.

On the pool each is a run of the deployment ``gpu-stage``. Only small JSON manifests cross between
the two machines.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

import httpx
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import arun_deployment
from prefect.runtime import flow_run
from prefect.states import Cancelling
from pydantic import TypeAdapter

from babylon.blocks.load import Overrides, settings_with
from babylon.core.errors import TrainingError
from babylon.core.settings import Settings
from babylon.core.types import Scored, Trained, Verdict
from babylon.tasks.train import train
from babylon.tasks.validate_checkpoint import validate_checkpoint

Placement = Literal["inline", "deployed"]
DEPLOYMENT = "gpu-stage/gpu-stage"
POLL_S = 2.0


@flow(name="gpu-stage", flow_run_name="{manifest.claim.window_id}", result_serializer="json")
async def gpu_stage(
    manifest: Scored | Trained,
    overrides: Overrides | None = None,
    blocks: Sequence[str] = (),
) -> dict[str, Any]:
    """Run the stage that takes this manifest: ``train``, or ``validate checkpoint``.

    Returns its own manifest as JSON, which the parent reads in another process.
    """
    settings = await settings_with(overrides, blocks)
    if isinstance(manifest, Scored):
        return asdict(await train(settings, manifest))
    return asdict(await validate_checkpoint(settings, manifest))


@dataclass(frozen=True, slots=True)
class GpuStages:
    """The stages that need a GPU, run where ``placement`` says.

    Raises:
        TrainingError: the run on the pool did not end within ``STAGE_TIMEOUT_SECONDS``.
    """

    settings: Settings
    overrides: Overrides | None
    blocks: Sequence[str]
    placement: Placement

    async def train(self, scored: Scored) -> Trained:
        if self.placement == "inline":
            return await train(self.settings, scored)
        return TypeAdapter(Trained).validate_python(await self._on_pool("train", scored))

    async def validate_checkpoint(self, trained: Trained) -> Verdict:
        if self.placement == "inline":
            return await validate_checkpoint(self.settings, trained)
        verdict = await self._on_pool("validate checkpoint", trained)
        return TypeAdapter(Verdict).validate_python(verdict)

    async def _on_pool(self, stage: str, manifest: Scored | Trained) -> object:
        """Start the deployment and wait for its result.

        The idempotency key joins a second start of the same attempt to the run of the first. It
        names epoch and attempt, because a key without them would return an earlier failure.
        """
        claim = manifest.claim
        attempt = f"{claim.window_id}/{claim.epoch}/{flow_run.run_count or 1}"
        run = await arun_deployment(
            DEPLOYMENT,
            parameters=TypeAdapter(dict[str, object]).dump_python(
                {
                    "manifest": manifest,
                    "overrides": self.overrides,
                    "blocks": list(self.blocks),
                },
                mode="json",
            ),
            timeout=0,  # returns at once, because the run must be known to be cancelled
            idempotency_key=f"{flow_run.id}/{stage}/{attempt}",
            tags=[stage],
        )
        run = await _finished(run, self.settings.prefect.stage_timeout_s)
        assert run.state is not None  # it is final
        return await run.state.aresult()


async def _finished(run: FlowRun, timeout_s: float) -> FlowRun:
    """Wait until a run ends. Cancel it on timeout, or when the caller is cancelled."""
    async with get_client() as client:
        try:
            async with asyncio.timeout(timeout_s):
                while not (run.state and run.state.is_final()):
                    await asyncio.sleep(POLL_S)
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
