"""A population's siblings are runs of their own on the ``gpu`` pool, side by side."""

import asyncio
from dataclasses import asdict

import pytest

from babylon.core.settings import Settings
from babylon.core.types import Artifact, Claim, Scored, SiblingOrder, Trained
from babylon.flows import gpu_stage
from babylon.flows.gpu_stage import GpuStages

CLAIM = Claim(window_id="2025-11-14T09:00", epoch=2, owner="test")
SCORED = Scored(
    claim=CLAIM,
    artifact=Artifact(
        uri="home:x.parquet", sha256="0" * 64, rows=3, schema_version=1, window_id=CLAIM.window_id
    ),
    eligible=3,
    agents=3,
    scorer="heuristic",
    avg_reward=0.5,
)
TRAINED = Trained(
    claim=CLAIM,
    batch_id="window-x",
    policy_version=1,
    parent_version=0,
    checkpoint_uri="home:checkpoints/x",
    metrics={},
)


@pytest.mark.parametrize("size", [1, 3])
async def test_siblings_run_side_by_side_and_then_the_train_stage(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    started: list[str] = []
    all_here = asyncio.Event()

    async def on_pool(stage: str, parameters: dict, claim: Claim, prefect: object) -> object:
        started.append(stage)
        manifest = parameters["manifest"]
        if isinstance(manifest, SiblingOrder):
            assert stage == f"sibling {manifest.member}" and claim == CLAIM
            if len(started) == size:
                all_here.set()
            await asyncio.wait_for(all_here.wait(), 5)  # none waits for another to end
            if manifest.member == 1:
                raise RuntimeError("its worker died")  # the train stage does it again
            return {"member": manifest.member}
        return asdict(TRAINED)

    monkeypatch.setattr(gpu_stage, "on_pool", on_pool)
    chosen = settings.replace(population={"size": size})
    trained = await GpuStages(chosen, None, (), "deployed").train(SCORED)
    assert trained == TRAINED
    assert started == [*(f"sibling {n}" for n in range(size) if size > 1), "train"]
