"""Removal of checkpoints on a real Postgres and a real disk."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from babylon.core.errors import ModelError
from babylon.core.settings import Settings
from babylon.core.types import Claim
from babylon.core.windows import Window, WindowState
from babylon.deployment.change import ChangeRequest, checks_under
from babylon.deployment.replace import replace_champion
from babylon.deployment.rollback import roll_back
from babylon.stages import retention
from babylon.stages.retention import retire_checkpoints, sweep
from babylon.stages.train import checkpoint_directory
from babylon.store import Store, open_store
from babylon.store.backup_lock import backup_lock, retention_lock
from babylon.store.experiments import pin_arm
from babylon.store.policies import ensure_base, get_policy, list_policies
from babylon.store.proposals import proposed
from babylon.store.routes import Split, commit_route, current_route, previous_champion
from babylon.store.windows import claim_window, set_state
from babylon.training.progress_directory import progress_directory
from tests.deployments import commit_under

START = datetime(2025, 11, 14, 0, tzinfo=UTC)


def window(hour: int) -> Window:
    return Window(START + timedelta(hours=hour))


def make(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


async def train(
    store: Store, settings: Settings, hour: int, parent: int, *, done: bool = True
) -> Claim:
    """Commit a checkpoint for a window; with ``done`` the window ends as rejected."""
    claim = await claim_window(store, window(hour), owner="worker", lease_s=60)
    make(checkpoint_directory(settings.home, claim))
    await commit(store, settings, claim, parent)
    if done:
        await set_state(store, claim, WindowState.REJECTED)
    return claim


async def commit(store: Store, settings: Settings, claim: Claim, parent: int) -> None:
    await commit_under(
        store,
        claim,
        parent,
        kind="full",
        uri=str(checkpoint_directory(settings.home, claim)),
        base_model="tiny",
        batch_id=f"window-{claim.window_id}",
        trajectory_ids=[claim.window_id],
        metrics={},
    )


@pytest.fixture
async def lean(store: Store, settings: Settings, tmp_path: Path) -> Settings:
    """Settings that keep one checkpoint of each kind; the base model is outside the home."""
    await ensure_base(store, uri=str(make(tmp_path / "base")), base_model="tiny")
    return settings.replace(deployment={"keep_checkpoints": 1})


def there(settings: Settings) -> list[str]:
    return sorted(path.name for path in settings.home.checkpoints.iterdir())


async def removed(store: Store) -> list[int]:
    return [p.policy_version for p in await list_policies(store) if p.removed_at]


async def test_unused_checkpoints_are_removed_and_marked(store: Store, lean: Settings) -> None:
    for hour in range(4):
        await train(store, lean, hour, parent=hour)
        await replace_champion(
            store, checks_under(lean), hour + 1, ChangeRequest(author="test", reason="better")
        )
    assert await retire_checkpoints(store, lean) == (1, 2)
    assert there(lean) == ["2025-11-14T0200-e1", "2025-11-14T0300-e1"]
    assert await removed(store) == [1, 2]
    assert (Path((await get_policy(store, 0)).uri) / "model.safetensors").exists()
    assert await retire_checkpoints(store, lean) == ()


async def test_a_removed_policy_can_never_be_routed_again(store: Store, lean: Settings) -> None:
    for hour in range(4):
        await train(store, lean, hour, parent=hour)
        await replace_champion(
            store, checks_under(lean), hour + 1, ChangeRequest(author="test", reason="better")
        )
    await retire_checkpoints(store, lean)
    await roll_back(store, ChangeRequest(author="t", reason="back"))
    for version in (1, (await previous_champion(store)).policy_version):
        with pytest.raises(ModelError, match=f"policy {version} was removed .*babylon model list"):
            await replace_champion(
                store,
                checks_under(lean),
                version,
                ChangeRequest(author="test", reason="back again"),
            )
    assert (await get_policy(store, 3)).removed_at is None


async def test_a_trained_window_keeps_its_policy_and_parent(store: Store, lean: Settings) -> None:
    for hour in range(3):
        await train(store, lean, hour, parent=hour)
    await train(store, lean, 3, parent=1, done=False)
    await train(store, lean, 4, parent=0)
    assert await retire_checkpoints(store, lean) == (2, 3)


async def test_a_training_keeps_the_champion_it_began_with(store: Store, lean: Settings) -> None:
    await train(store, lean, 0, parent=0)
    await replace_champion(
        store, checks_under(lean), 1, ChangeRequest(author="test", reason="better")
    )
    await claim_window(store, window(9), owner="trainer", lease_s=60)
    for hour in (1, 2, 3):
        await train(store, lean, hour, parent=hour)
        await replace_champion(
            store, checks_under(lean), hour + 1, ChangeRequest(author="test", reason="better")
        )
    assert await retire_checkpoints(store, lean) == ()
    await store.pool.execute("UPDATE babylon.windows SET lease_until = now() - interval '1 s'")
    assert await retire_checkpoints(store, lean) == (1, 2)


async def test_challengers_and_open_proposals_stay(store: Store, lean: Settings) -> None:
    for hour in range(4):
        await train(store, lean, hour, parent=0)
    split = Split(mode="ab", challenger_version=1, share=0.5, salt="experiment")
    await route_to(store, 0, split)
    async with proposed(store, 2, "test"):
        assert await retire_checkpoints(store, lean) == (3,)
    assert await retire_checkpoints(store, lean) == (2,)
    await route_to(store, 0)
    assert await retire_checkpoints(store, lean) == (1,)


async def test_a_training_keeps_both_arms_of_its_first_route(store: Store, lean: Settings) -> None:
    for hour in range(3):
        await train(store, lean, hour, parent=0)
    await route_to(store, 0, Split(mode="ab", challenger_version=1, share=0.5, salt="experiment"))
    await claim_window(store, window(9), owner="trainer", lease_s=60)
    await route_to(store, 0)
    assert await retire_checkpoints(store, lean) == (2,)


async def route_to(store: Store, policy_version: int, split: Split | None = None) -> None:
    route = await current_route(store)
    await commit_route(
        store,
        policy_version=policy_version,
        author="test",
        reason="test",
        expected_route_version=route.route_version,
        split=split,
    )


async def test_a_base_that_is_a_checkpoint_is_never_gone(store: Store, lean: Settings) -> None:
    for hour in range(3):
        claim = await train(store, lean, hour, parent=hour)
    adapter = {"base_model_name_or_path": (await get_policy(store, 1)).uri}
    (checkpoint_directory(lean.home, claim) / "adapter_config.json").write_text(json.dumps(adapter))
    assert await retire_checkpoints(store, lean) == (2,)


async def test_an_adapter_without_base_keeps_all_and_is_named(store: Store, lean: Settings) -> None:
    for hour in range(3):
        claim = await train(store, lean, hour, parent=hour)
    orphan = make(lean.home.checkpoints / "2025-11-14T0000-e0")  # of a claim before the first one
    config = checkpoint_directory(lean.home, claim) / "adapter_config.json"
    for broken in ("{ cut off", "{}"):
        config.write_text(broken)
        with pytest.raises(ModelError, match=r"no checkpoint .*e1/adapter_config.json"):
            await retire_checkpoints(store, lean)
    assert await removed(store) == [] and len(there(lean)) == 3
    assert not orphan.exists()


async def test_a_crash_between_mark_and_deletion_is_repaired(store: Store, lean: Settings) -> None:
    for hour in range(2):
        await train(store, lean, hour, parent=hour)
    await store.pool.execute(
        "UPDATE babylon.policies SET removed_at = now() WHERE policy_version = 1"
    )
    await retire_checkpoints(store, lean)
    assert there(lean) == ["2025-11-14T0100-e1"]


async def test_a_directory_that_cannot_be_deleted_is_logged_and_tried_again(
    store: Store, lean: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for hour in range(2):
        await train(store, lean, hour, parent=hour)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as broken:
        broken.setattr("shutil.rmtree", refuse)
        assert await retire_checkpoints(store, lean) == (1,)
    assert "2025-11-14T0000-e1 cannot be deleted" in caplog.text
    assert there(lean) == ["2025-11-14T0000-e1", "2025-11-14T0100-e1"]
    assert await retire_checkpoints(store, lean) == ()
    assert there(lean) == ["2025-11-14T0100-e1"]


async def test_only_directories_of_stale_claims_are_swept(store: Store, lean: Settings) -> None:
    fenced = await claim_window(store, window(0), owner="a", lease_s=0)
    live = await claim_window(store, window(0), owner="b", lease_s=0)  # it may still commit
    failed = await claim_window(store, window(1), owner="a", lease_s=60)
    await set_state(store, failed, WindowState.FAILED)
    for claim in (fenced, live, failed):
        target = make(checkpoint_directory(lean.home, claim))
        make(target.with_name(f".{target.name}-x1y2z3w4"))  # its temporary one
    foreign = Claim(window_id="2020-01-01T00:00", epoch=3, owner="of another database")
    for other in (
        checkpoint_directory(lean.home, foreign),
        lean.home.checkpoints / "mine",
        lean.home.models,
    ):
        make(other)
    (lean.home.checkpoints / "2025-11-14T0100-e7").symlink_to(lean.home.models)
    await retire_checkpoints(store, lean)
    assert there(lean) == [
        ".2025-11-14T0000-e2-x1y2z3w4",
        "2020-01-01T0000-e3",
        "2025-11-14T0000-e2",
        "2025-11-14T0100-e7",
        "mine",
    ]
    assert (lean.home.models / "model.safetensors").exists()


async def test_a_linked_home_keeps_its_own(store: Store, lean: Settings, tmp_path: Path) -> None:
    await train(store, lean, 0, parent=0)
    (tmp_path / "link").symlink_to(lean.home.root)
    await retire_checkpoints(store, lean.replace(home=tmp_path / "link"))
    assert there(lean) == ["2025-11-14T0000-e1"]


async def test_a_recipe_named_like_a_claim_keeps_its_files(store: Store, lean: Settings) -> None:
    """``+x-e2``'s first claim must not be read as the second one of ``+x``, which is over."""
    claims = [
        await claim_window(store, Window(START, recipe=recipe), owner="worker", lease_s=60)
        for recipe in ("x", "x-e2")
    ]
    for state in (WindowState.TRAINED, WindowState.REJECTED):
        await set_state(store, claims[0], state)
    for claim in claims:
        make(checkpoint_directory(lean.home, claim))
    make(lean.home.checkpoints / ".2025-11-14T0000+x-e1-abc_1234")
    await sweep(store, lean.home, lean.windows.lookback_hours)
    assert there(lean) == ["2025-11-14T0000+x-e2-e1"]


@pytest.mark.parametrize("query", ["worked_windows", "checkpoints"])
async def test_a_checkpoint_that_is_committed_during_the_sweep_stays(
    store: Store, lean: Settings, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    claim = await claim_window(store, window(0), owner="worker", lease_s=60)
    make(checkpoint_directory(lean.home, claim))
    read = getattr(retention, query)

    async def commit_after(store: Store) -> object:
        answer = await read(store)
        await commit(store, lean, claim, parent=0)
        return answer

    monkeypatch.setattr(retention, query, commit_after)
    await sweep(store, lean.home, lean.windows.lookback_hours)
    assert there(lean) == ["2025-11-14T0000-e1"]


async def test_progress_stays_while_its_window_may_resume(store: Store, lean: Settings) -> None:
    done = await train(store, lean, 0, parent=0)
    claimed = await claim_window(store, window(1), owner="a", lease_s=0)
    failed, old = [
        await claim_window(store, window(hour), owner="a", lease_s=60) for hour in (2, 3)
    ]
    for claim in (failed, old):
        await set_state(store, claim, WindowState.FAILED)
    await store.pool.execute(
        "UPDATE babylon.windows SET updated_at = now() - $2::interval WHERE window_id = $1",
        old.window_id,
        timedelta(hours=lean.windows.lookback_hours + 1),
    )
    for claim in (done, claimed, failed, old):
        make(progress_directory(lean.home, claim))
    await retire_checkpoints(store, lean)
    assert sorted(path.name for path in lean.home.progress.iterdir()) == [
        "2025-11-14T0100-e1",
        "2025-11-14T0200-e1",
    ]


async def test_siblings_stay_while_their_window_may_resume(store: Store, lean: Settings) -> None:
    """A claim trains no sibling that an earlier one trained, and commits the fittest of all."""
    done = await train(store, lean, 0, parent=0)
    lost = await claim_window(store, window(1), owner="a", lease_s=0)
    failed = await claim_window(store, window(2), owner="a", lease_s=60)
    await set_state(store, failed, WindowState.FAILED)
    await claim_window(store, window(1), owner="b", lease_s=60)
    for claim in (done, lost, failed):
        own = checkpoint_directory(lean.home, claim)
        make(own.with_name(f"{own.name}-m1"))
        make(own.with_name(f".{own.name}-m1-x1y2z3w4"))  # its temporary one
    await retire_checkpoints(store, lean)
    assert there(lean) == [
        "2025-11-14T0000-e1",  # a policy
        "2025-11-14T0100-e1-m1",
        "2025-11-14T0200-e1-m1",
    ]


async def test_arms_are_forgotten_after_their_experiment(store: Store, lean: Settings) -> None:
    await train(store, lean, 1, 0)
    begun = {"long over": 400, "over": 300, "running": 1}  # hours ago
    for salt, hours in begun.items():
        split = Split(mode="ab", challenger_version=1, share=0.5, salt=salt)
        await commit_route(
            store,
            policy_version=0,
            author="test",
            reason="test",
            expected_route_version=(await current_route(store)).route_version,
            split=split,
        )
        await pin_arm(store, salt, "trajectory", "champion")
        await store.pool.execute(
            "UPDATE babylon.routes SET created_at = now() - $2 * interval '1 hour' WHERE salt = $1",
            salt,
            hours,
        )
    kept = "SELECT array_agg(salt ORDER BY salt) FROM babylon.trajectory_arms"
    for lookback_hours, expected in ((301, 3), (299, 2)):
        settings = lean.replace(windows={"lookback_hours": lookback_hours})
        await retire_checkpoints(store, settings)
        assert len(await store.pool.fetchval(kept)) == expected
    assert await store.pool.fetchval(kept) == ["over", "running"]  # it ended an hour ago


async def test_nothing_outside_home_removed(store: Store, lean: Settings, tmp_path: Path) -> None:
    for hour in range(3):
        await train(store, lean, hour, parent=hour)
    elsewhere = make(tmp_path / "elsewhere")
    for version, uri in ((1, elsewhere), (2, lean.home.checkpoints / "deeper" / "one")):
        await store.pool.execute(
            "UPDATE babylon.policies SET uri = $2 WHERE policy_version = $1", version, str(uri)
        )
    make(lean.home.checkpoints / "deeper" / "one")
    assert await retire_checkpoints(store, lean) == ()
    assert elsewhere.exists() and (lean.home.checkpoints / "deeper" / "one").exists()


async def test_promotion_and_removal_take_turns(store: Store, lean: Settings) -> None:
    """In either order, the policy that serves keeps its checkpoint."""
    for hour in range(3):
        await train(store, lean, hour, parent=hour)
    results = await asyncio.gather(
        retire_checkpoints(store, lean),
        replace_champion(
            store, checks_under(lean), 1, ChangeRequest(author="test", reason="by hand")
        ),
        return_exceptions=True,
    )
    if isinstance(results[1], BaseException):
        assert "was removed" in str(results[1]) and results[0] == (1, 2)
    else:
        assert Path((await get_policy(store, 1)).uri).exists() and results[0] == (2,)


async def test_a_backup_waits_for_a_retention_that_outlasts_a_query(
    store: Store, lean: Settings
) -> None:
    assert lean.database.url is not None
    url = f"{lean.database.url.get_secret_value()}?socket_timeout=0.5"

    async def back_up(impatient: Store) -> None:
        async with backup_lock(impatient):
            pass

    async with open_store(lean.replace(database={"url": url})) as impatient:
        async with retention_lock(store) as other:
            assert other == ""
            backup = asyncio.create_task(back_up(impatient))
            await asyncio.sleep(1.5)
            assert not backup.done()
        await asyncio.wait_for(backup, 10)


async def test_a_retention_names_what_runs_instead(
    store: Store, lean: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "babylon.stages.retention")
    for hour in range(2):
        await train(store, lean, hour, parent=hour)
    for lock, name in ((retention_lock, "another retention"), (backup_lock, "a backup")):
        async with lock(store):
            assert await retire_checkpoints(store, lean) == ()
        assert caplog.messages[-1] == f"{name} runs: this one removes no checkpoint"
    assert await retire_checkpoints(store, lean) == (1,)
