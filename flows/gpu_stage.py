"""Training and checkpoint validation, in this process or on the ``gpu`` work pool.

On the pool each is a run of the deployment ``gpu-stage``. Only small JSON manifests cross between
the two machines.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from prefect import flow

from babylon.blocks.form import Overrides
from babylon.blocks.load import settings_with
from babylon.core.settings import Settings
from babylon.core.types import Scored, SiblingOrder, Trained, Verdict
from babylon.tasks.pool import on_pool, refuse_if_crashed, said
from babylon.tasks.train import train
from babylon.tasks.validate_checkpoint import validate_checkpoint

Placement = Literal["inline", "deployed"]
log = logging.getLogger("babylon.flows")


def committed(trained: Trained | None) -> Trained:
    """Return the manifest of an update that was committed, as all but a sibling's are."""
    assert trained is not None
    return trained


@flow(name="gpu-stage", flow_run_name="{manifest.claim.window_id}", result_serializer="json")
async def gpu_stage(
    manifest: Scored | Trained | SiblingOrder,
    overrides: Overrides | None = None,
    blocks: Sequence[str] = (),
) -> dict[str, Any]:
    """Run the stage that takes this manifest: ``train``, one sibling, or ``validate checkpoint``.

    Returns its own manifest as JSON, which the parent reads in another process.
    """
    await refuse_if_crashed()
    settings = await settings_with(overrides, blocks)
    if isinstance(manifest, SiblingOrder):
        await train(settings, manifest.scored, manifest.member)
        return {"member": manifest.member}
    if isinstance(manifest, Scored):
        return asdict(committed(await train(settings, manifest)))
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
            return committed(await train(self.settings, scored))
        if self.settings.population.size > 1:
            await self._siblings(scored)
        return said("train", Trained, await self._on_pool("train", scored))

    async def validate_checkpoint(self, trained: Trained) -> Verdict:
        if self.placement == "inline":
            return await validate_checkpoint(self.settings, trained)
        name = "validate checkpoint"
        return said(name, Verdict, await self._on_pool(name, trained))

    async def _siblings(self, scored: Scored) -> None:
        """Train a population's members side by side. Stage ``train`` does what fails here."""
        orders = [
            SiblingOrder(scored=scored, member=member)
            for member in range(self.settings.population.size)
        ]
        # With pairs, the first one samples the replies that all learn from.
        alone = 1 if "dpo" in self.settings.training.objective.split("+") else 0
        results: list[object] = []
        for some in (orders[:alone], orders[alone:]):
            runs = [self._on_pool(f"sibling {order.member}", order) for order in some]
            results += await asyncio.gather(*runs, return_exceptions=True)
        for order, result in zip(orders, results, strict=True):
            if isinstance(result, Exception):
                log.warning("sibling %d: %s", order.member, result)
            elif isinstance(result, BaseException):
                raise result

    async def _on_pool(self, stage: str, manifest: Scored | Trained | SiblingOrder) -> object:
        settings = {"overrides": self.overrides, "blocks": list(self.blocks)}
        return await on_pool(
            stage, {"manifest": manifest, **settings}, manifest.claim, self.settings.prefect
        )
