"""The two stages that want a GPU, as a flow of its own.

``placement="inline"`` calls it as an ordinary subflow. ``"deployed"`` starts its deployment on the
``gpu`` work pool and waits, so only small JSON manifests cross between the two machines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prefect import flow
from prefect.deployments import arun_deployment
from prefect.runtime import flow_run
from pydantic import TypeAdapter

from babylon.types import Scored, Trained, Verdict
from blocks.load import settings_with
from tasks.train import train
from tasks.validate_checkpoint import validate_checkpoint

Placement = Literal["inline", "deployed"]
DEPLOYMENT = "gpu-stages/gpu-stages"


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
        poll_interval=2,
        idempotency_key=f"{claim.window_id}/{claim.epoch}/{flow_run.run_count or 1}",
    )
    assert run.state is not None  # arun_deployment waits for a final state
    return _candidate.validate_python(await run.state.aresult())
