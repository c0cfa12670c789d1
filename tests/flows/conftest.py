"""Flows as they run inline, and the real window of the game to train on.

The Prefect server of all flow tests is the one that an inline flow starts by itself, with its
database in memory: Prefect's own test harness keeps it in an SQLite file, and a test waits a
minute whenever that is locked.

Collecting, checking, thinning, scoring, claims and states are the real ones on a real Postgres.
Only the update and the arena are replaced, because they take minutes; what replaces them commits a
real policy, so everything after it is real again.
"""

import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
)

from babylon.core.artifacts import read_artifact
from babylon.core.settings import Settings
from babylon.core.types import Scored, Trained, Verdict
from babylon.store import Store
from babylon.store.policies import champion, commit_policy, ensure_base, next_batch, set_verdict
from babylon.training.backends.train_input import Progress
from tests.integration.game import insert_real_window


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Prefect leaves a socket of each event loop to the garbage collector, so flow tests forgive
    that, and ``collect_sockets`` makes sure that no test of another file has to. It takes a second,
    so each file does it once."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


@pytest.fixture(scope="module", autouse=True)
def collect_sockets() -> Iterator[None]:
    yield
    gc.collect()


@dataclass
class Workshop:
    """Stands in for torch: how often it was asked, and what it is to answer."""

    promote: bool = True
    training_error: Exception | None = None
    validation_error: BaseException | None = None
    trained: list[str] = field(default_factory=list)
    meanwhile: Callable[[Store], Awaitable[None]] | None = None  # between champion and commit

    async def train(
        self,
        store: Store,
        settings: Settings,
        scored: Scored,
        *,
        progress: Progress,
        member: int | None = None,
    ) -> Trained:
        assert member is None  # no populations here
        self.trained.append(scored.claim.window_id)
        progress(1, 2)
        if self.training_error:
            raise self.training_error
        batch_id = await next_batch(store, scored.claim.window_id)
        parent = (await champion(store))[0].policy_version
        if self.meanwhile:
            await self.meanwhile(store)
        metrics = {"training_loss": 0.5, "kl_before": 0.0, "kl_after": 0.01, "kl_divergence": 0.01}
        version = await commit_policy(
            store,
            scored.claim,
            parent_version=parent,
            kind="lora",
            uri="file:///checkpoint",
            base_model="tiny",
            batch_id=batch_id,
            trajectory_ids=read_artifact(settings.home, scored.artifact)["trajectory_id"].to_list(),
            metrics=metrics,
        )
        return Trained(
            claim=scored.claim,
            batch_id=batch_id,
            policy_version=version,
            parent_version=parent,
            checkpoint_uri="file:///checkpoint",
            metrics=metrics,
        )

    async def validate(
        self, store: Store, settings: Settings, trained: Trained, *, progress: Progress
    ) -> Verdict:
        if self.validation_error:
            raise self.validation_error
        verdict = Verdict(
            claim=trained.claim,
            policy_version=trained.policy_version,
            route_version=(await champion(store))[1],
            promote=self.promote,
            reason="not worse" if self.promote else "worse",
            scenarios=8,
            pnl_before=1.0,
            pnl_after=2.0,
            pnl_difference_low=0.5,
            pnl_difference_high=1.5,
            win_rate_before=0.4,
            win_rate_after=0.5,
            malformed_before=0.0,
            malformed_after=0.0,
            drawdown_before=3.0,
            drawdown_after=3.0,
        )
        await set_verdict(store, trained.claim, trained.policy_version, asdict(verdict))
        return verdict


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch) -> Workshop:
    workshop = Workshop()
    monkeypatch.setattr("babylon.tasks.train.train_window", workshop.train)
    monkeypatch.setattr("babylon.stages.validate_checkpoint.validate_checkpoint", workshop.validate)
    return workshop


@pytest.fixture
async def played(
    settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Settings]:
    """The real window in a database of this test's own, which the environment names."""
    assert settings.database.url is not None
    monkeypatch.setenv("DATABASE_URL", settings.database.url.get_secret_value())
    monkeypatch.setenv("BABYLON_HOME", str(settings.home.root))
    await insert_real_window(store)
    await ensure_base(store, uri="file:///base", base_model="tiny")
    yield settings


@pytest.fixture
def pages() -> Callable[[str], Awaitable[list[str]]]:
    """Return the artifacts of a key that this test left on the shared server."""
    began = datetime.now(UTC)

    async def left(key: str) -> list[str]:
        named = ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
        async with get_client() as client:
            found = await client.read_artifacts(artifact_filter=named)
        return [str(one.data) for one in found if one.created and one.created >= began]

    return left


async def play_the_next_hour(store: Store) -> None:
    await store.pool.execute(
        "INSERT INTO trajectories SELECT (jsonb_populate_record(t, jsonb_build_object("
        "'id', t.id || '+', 'trajectoryId', t.\"trajectoryId\" || '+',"
        "'windowId', '2025-11-14T10:00', 'startTime', t.\"startTime\" + interval '1 hour',"
        "'endTime', t.\"endTime\" + interval '1 hour'))).* FROM trajectories t"
    )
