"""``babylon doctor`` on a home that lost or damaged a part of its state."""

import shutil
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from babylon.core.artifacts import write_artifact
from babylon.core.settings import Settings
from babylon.core.types import Artifact, Claim, Scored
from babylon.ops.state_checks import check_state
from babylon.policies.checkpoint_files import checkpoint_digest
from babylon.store import Store
from babylon.store.policies import ensure_base
from tests.tiny_policy import save_tiny_policy

WINDOW = "2025-11-14T09:00"


async def found(store: Store) -> dict[str, tuple[bool | None, str]]:
    @asynccontextmanager
    async def opened() -> Any:
        yield store

    findings = await check_state(opened(), embedded=False)
    return {finding.name: (finding.ok, finding.detail) for finding in findings}


@pytest.fixture
async def base(store: Store, settings: Settings) -> Path:
    path = save_tiny_policy(settings.home.models / "tiny", seed=0)
    await ensure_base(store, uri=str(path), base_model="t", digest=checkpoint_digest(str(path)))
    return path


async def scoring(store: Store, settings: Settings) -> Path:
    frame = pl.DataFrame({"x": [1, 2]})
    artifact = write_artifact(settings.home, frame, window_id=WINDOW, stage="scored")
    await name(store, artifact)
    return Path(settings.home.resolve(artifact.uri))


async def name(store: Store, artifact: Artifact) -> None:
    claim = Claim(window_id=WINDOW, epoch=1, owner="me")
    scored = Scored(
        claim=claim, artifact=artifact, eligible=1, agents=1, scorer="h", avg_reward=0.0
    )
    await store.pool.execute(
        "INSERT INTO babylon.windows (window_id, minutes, scored) VALUES ($1, 60, $2)",
        WINDOW,
        asdict(scored),
    )


async def test_a_new_home_and_a_complete_one_are_well(store: Store, settings: Settings) -> None:
    checks = await found(store)
    assert checks["champion"][0] is None and checks["artifacts"][0] and checks["database"][0]


async def test_the_champion_is_compared_and_loaded(
    store: Store, settings: Settings, base: Path
) -> None:
    ok, detail = (await found(store))["champion"]
    assert ok and detail.endswith("loads")
    weights = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(weights[:-1] + b"x")
    ok, detail = (await found(store))["champion"]
    assert ok is False and "its files have digest" in detail and "restore it from" in detail
    (base / "model.safetensors").write_bytes(weights[:1000])
    await store.pool.execute("UPDATE babylon.policies SET digest = NULL")
    ok, detail = (await found(store))["champion"]
    assert ok is False and "no policy loads from" in detail
    shutil.rmtree(base)
    ok, detail = (await found(store))["champion"]
    assert ok is False and "there is no such directory" in detail


async def test_an_object_store_without_the_champion_is_no_fault_of_the_database(
    store: Store, settings: Settings, base: Path, tmp_path: Path
) -> None:
    shutil.rmtree(base)
    (tmp_path / "store").mkdir()
    home = replace(settings.home, store=(tmp_path / "store").as_uri())
    findings = await found(replace(store, home=home))
    assert findings["database"][0]
    ok, detail = findings["champion"]
    assert ok is False and f"models/{base.name}" in detail
    assert "artifacts" in findings


async def test_the_newest_artifact_of_each_kind_is_read_and_none_may_be_missing(
    store: Store, settings: Settings
) -> None:
    path = await scoring(store, settings)
    published = write_artifact(settings.home, pl.DataFrame({"x": [3]}), window_id=WINDOW)
    day = settings.home.datasets / "trajectories" / "2025-11"
    day.mkdir(parents=True)
    shutil.move(settings.home.resolve(published.uri), day)
    ok, detail = (await found(store))["artifacts"]
    assert ok and detail == "1 that windows name are there; dataset trajectories, scored read"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    ok, detail = (await found(store))["artifacts"]
    assert ok is False and f"{path} is damaged" in detail
    path.unlink()
    ok, detail = (await found(store))["artifacts"]
    assert ok is False and f"1 missing, the first is home:artifacts/{path.name}" in detail
