"""A home that moves, and a backup of a running system that is restored elsewhere."""

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import asyncpg
import pytest

from babylon.core.artifacts import read_artifact
from babylon.core.errors import BabylonError, DatabaseError, StorageError
from babylon.core.home import Home, server_account
from babylon.core.objects import exists, fetch, publish
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.core.windows import WindowState
from babylon.deployment.change import ChangeRequest, checks_under
from babylon.deployment.replace import replace_champion
from babylon.ops.backup import backup as backing_up
from babylon.ops.backup.backup import MANIFEST, back_up
from babylon.ops.backup.restore import restore
from babylon.policies.checkpoint_files import checkpoint_digest
from babylon.policies.load import load_policy
from babylon.stages.claim import commit_scored
from babylon.stages.retention import retire_checkpoints
from babylon.stages.train import train_window
from babylon.store import Store, open_store
from babylon.store.calls import insert_calls
from babylon.store.policies import champion, ensure_base, get_policy, list_policies
from babylon.store.windows import get_window, set_state
from tests.conftest import fresh_database
from tests.integration.test_checks import call
from tests.integration.test_train_stage import REPLIES, rows, scored
from tests.ports import free_port
from tests.tiny_policy import save_tiny_policy

# A large home, with the times that it takes: BACKUP_CALLS=1000000 pytest -s -k running_system
CALLS = int(os.environ.get("BACKUP_CALLS", "10"))
QUICK = {"iterations": 1, "batch_size": 4, "accumulation": 1, "learning_rate": 1e-4}
HOUR = 9


async def begin(store: Store, settings: Settings) -> None:
    """Register a base model in the home and promote the policy of a first window."""
    base = save_tiny_policy(settings.home.models / "tiny", seed=0)
    digest = checkpoint_digest(str(base))
    await ensure_base(store, uri=str(base), base_model="tiny", digest=digest)
    await train(store, settings, HOUR)


async def train(store: Store, settings: Settings, hour: int) -> None:
    """Train the champion on the play of an hour, and promote the result."""
    base, (parent, _) = (await get_policy(store, 0)).uri, await champion(store)
    played = rows(Path(base), version=parent.policy_version)
    window = await scored(store, settings, hour, played)
    await commit_scored(store, window)
    trained = await train_window(store, settings, window)
    request = ChangeRequest(author="test", reason="better")
    await replace_champion(store, checks_under(settings), trained.policy_version, request)
    await set_state(store, window.claim, WindowState.DEPLOYED)


async def works(store: Store, settings: Settings, hour: int) -> None:
    """The champion is what was committed, it loads, and the next window trains from it."""
    policy, _ = await champion(store)
    assert Path(policy.uri).is_relative_to(settings.home.root)
    assert checkpoint_digest(policy.uri) == policy.digest is not None
    load_policy(policy.uri)
    await train(store, settings, hour)
    assert (await champion(store))[0].parent_version == policy.policy_version


@pytest.fixture
def embedded(tmp_path: Path) -> Settings:
    return load_settings(home=tmp_path / "home").replace(training=QUICK)


@pytest.fixture
def system(settings: Settings) -> Settings:
    return settings.replace(training=QUICK)


async def test_a_home_that_is_moved_or_copied_trains_its_next_window(
    embedded: Settings, tmp_path: Path
) -> None:
    async with open_store(embedded) as store:
        await begin(store, embedded)
    (tmp_path / "elsewhere").mkdir()
    shutil.move(embedded.home.root, tmp_path / "elsewhere" / "moved")
    moved = load_settings(home=tmp_path / "elsewhere" / "moved").replace(training=QUICK)
    async with open_store(moved) as store:
        await works(store, moved, HOUR + 1)
        window = await get_window(store, f"2025-11-14T{HOUR:02}:00")
        assert window is not None and window.scored is not None
        assert read_artifact(moved.home, window.scored.artifact).height == len(REPLIES)
    shutil.copytree(moved.home.root, tmp_path / "copied")  # as root: of another owner
    shutil.rmtree(moved.home.root)
    copied = load_settings(home=tmp_path / "copied").replace(training=QUICK)
    async with open_store(copied) as store:
        await works(store, copied, HOUR + 2)


@pytest.fixture(scope="module")
def older_postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of another major version than the embedded one's."""
    found = sorted(Path("/usr/lib/postgresql").glob("1[4-7]/bin/initdb"))
    if not found:
        pytest.skip("no PostgreSQL 14 to 17 is installed")
    folder, data = found[-1].parent, tmp_path_factory.mktemp("older") / "data"
    account = server_account(data.parent)
    if os.geteuid() == 0:
        for path in data.parents[: data.parents.index(Path(gettempdir()))]:
            path.chmod(0o755)  # the account must reach it
        data.mkdir()
        os.chown(data, account.pw_uid, account.pw_gid)
    port = free_port()
    options: dict[str, Any] = {"cwd": "/", "env": {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}}
    if os.geteuid() == 0:
        options |= {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    make = [folder / "initdb", "-D", data, "-U", "babylon", "--auth=trust", "--encoding=UTF8"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL, **options)
    settings = ("listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off")
    start = [folder / "postgres", "-D", data, "-p", str(port)]
    start += [word for setting in settings for word in ("-c", setting)]
    server = subprocess.Popen(start, stderr=subprocess.DEVNULL, **options)
    url = f"postgresql://babylon@127.0.0.1:{port}"
    try:
        asyncio.run(_create_database(f"{url}/postgres"))
        yield f"{url}/babylon"
    finally:
        server.terminate()
        server.wait(30)


async def _create_database(url: str) -> None:
    for _ in range(300):
        try:
            connection = await asyncpg.connect(url)
        except (OSError, asyncpg.CannotConnectNowError):
            await asyncio.sleep(0.1)
        else:
            await connection.execute("CREATE DATABASE babylon")
            return await connection.close()
    raise TimeoutError(url)


_CALLS = """
INSERT INTO babylon.calls (call_id, agent_id, policy_version, route_version, model, messages,
    response, prompt_token_ids, completion_token_ids, logprobs, temperature, top_p, max_tokens,
    finish_reason, trainable, started_at, latency_ms)
SELECT 'large-' || n, 'a', 0, 1, 'babylon', format('[{"role":"user","content":"%s"}]',
    repeat(md5(n::text), 30)), 'HOLD', ids[1:300], ids[300:340],
    array_fill(-0.123456::real, ARRAY[41]), 1, 1, 64, 'stop', true, now() - n * interval '1 second',
    7
FROM generate_series(1, $1::int) AS n,
    (SELECT array_agg((random() * 150000)::int) AS ids FROM generate_series(1, 340)) AS drawn
"""


@contextmanager
def timed(what: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - begun:.0f} s")


async def test_a_backup_of_a_running_system_is_restored_elsewhere(
    system: Settings, store: Store, tmp_path: Path, older_postgres: str, monkeypatch: Any
) -> None:
    """While the backup runs, a checkpoint is committed, a call is shipped and retention runs."""
    await begin(store, system)
    await train(store, system, HOUR + 1)
    await store.pool.execute(_CALLS, CALLS, timeout=3600)
    segment = system.home.recording / "1.calls"
    segment.parent.mkdir(parents=True, exist_ok=True)
    segment.write_bytes(b"a call on its way")
    write_tables, stop = backing_up.write_tables, asyncio.Event()

    async def while_others_write(*arguments: Any, **options: Any) -> Any:
        written = await write_tables(*arguments, **options)
        segment.unlink()  # shipped after the snapshot: its call is in neither table nor file
        lean = system.replace(deployment={"keep_checkpoints": 1}, training={"max_staleness": 0})
        assert await retire_checkpoints(store, lean) == ()
        return written

    async def after_a_commit(opened: Store) -> Any:  # later than the recording's files
        await train(store, system, HOUR + 2)
        return await list_policies(opened)

    async def write() -> None:
        number = 2
        while not stop.is_set():
            await insert_calls(store, [call("more", number=number)])
            number += 1

    monkeypatch.setattr(backing_up, "write_tables", while_others_write)
    monkeypatch.setattr(backing_up, "list_policies", after_a_commit)
    writer = asyncio.create_task(write())
    with timed(f"backup of {CALLS} calls"):
        manifest = await back_up(store, tmp_path / "backup")
    stop.set()
    await writer
    assert manifest.problems == []
    originals = {p.policy_version: p.digest for p in await list_policies(store)}
    await asyncio.to_thread(shutil.rmtree, system.home.root)  # nothing refers to the old place

    for name, url in (("older", older_postgres), ("embedded", None)):
        there = load_settings(database={"url": url}, home=tmp_path / name).replace(training=QUICK)
        with timed(f"restore into {name}"):
            await restore(there.database, there.home, tmp_path / "backup")
        async with open_store(there) as restored:
            found = await list_policies(restored)
            assert {p.policy_version: p.digest for p in found} == originals and len(found) == 4
            assert all(checkpoint_digest(p.uri) == p.digest for p in found)
            assert await restored.pool.fetchval("SELECT count(*) FROM babylon.calls") > CALLS
            assert (there.home.recording / "1.calls").read_bytes() == b"a call on its way"
            await works(restored, there, HOUR + 3)


@pytest.fixture
async def backup(system: Settings, store: Store, tmp_path: Path) -> Path:
    """A backup of a base model and one row of the judge's, whose key is an identity."""
    base = save_tiny_policy(system.home.models / "tiny", seed=0)
    await ensure_base(store, uri=str(base), base_model="t", digest=checkpoint_digest(str(base)))
    await store.pool.execute(
        "INSERT INTO babylon.judgments (window_id, scenario_id, key, judge, method, rubric,"
        " prompt_hash, trajectory_ids, scores, explanations, prompt_tokens, completion_tokens,"
        " usd) VALUES ('w', 's', 'k', 'j', 'm', 'r', 'h', '{}', '{}', '{}', 1, 1, 0)"
    )
    await back_up(store, tmp_path / "backup")
    return tmp_path / "backup"


@pytest.fixture
async def target(blank_database_url: str, tmp_path: Path) -> Settings:
    return load_settings(database={"url": blank_database_url}, home=tmp_path / "new")


async def test_identities_go_on_after_the_restored_rows(backup: Path, target: Settings) -> None:
    await restore(target.database, target.home, backup)
    async with open_store(target) as store:
        number = await store.pool.fetchval(
            "INSERT INTO babylon.judgments (window_id, scenario_id, key, judge, method, rubric,"
            " prompt_hash, trajectory_ids, scores, explanations, prompt_tokens, completion_tokens,"
            " usd) SELECT window_id, scenario_id, key, judge, method, rubric, prompt_hash,"
            " trajectory_ids, scores, explanations, 1, 1, 0 FROM babylon.judgments"
            " RETURNING judgment_id"
        )
        assert number == 2


@pytest.mark.parametrize("linked", [False, True])
async def test_an_empty_directory_of_the_new_home_is_filled(
    backup: Path, target: Settings, tmp_path: Path, linked: bool
) -> None:
    """A volume is mounted there, for example. A link stands for it here."""
    target.home.root.mkdir()
    if linked:
        (tmp_path / "volume").mkdir()
        target.home.models.symlink_to(tmp_path / "volume")
    else:
        target.home.models.mkdir()
    (target.home.root / "babylon.toml").write_text("# mine\n")
    (backup / "home" / "babylon.toml").write_text("# of the backup\n")
    await restore(target.database, target.home, backup)
    async with open_store(target) as store:
        base, _ = await champion(store)
        assert checkpoint_digest(base.uri) == base.digest is not None
    assert target.home.models.is_symlink() == linked
    assert (target.home.root / "babylon.toml").read_text() == "# mine\n"


async def test_after_an_object_store_that_takes_nothing_the_same_restore_works(
    backup: Path, target: Settings, tmp_path: Path
) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    (bucket / "models").touch()  # a file, so that nothing can be put below it
    home = Home(target.home.root, f"file://{bucket}")
    with pytest.raises(StorageError, match="does not take models/tiny"):
        await restore(target.database, home, backup)
    (bucket / "models").unlink()
    await restore(target.database, home, backup)
    async with open_store(target) as store:
        base, _ = await champion(store)
    elsewhere = Home(tmp_path / "another machine", home.store)
    assert checkpoint_digest(str(fetch(elsewhere, elsewhere.models / "tiny"))) == base.digest
    assert [path.name for path in (home.root / "cache" / "objects").iterdir()] == ["models%2Ftiny"]


async def test_files_that_find_no_place_are_named_with_what_to_do(
    backup: Path, target: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("babylon.ops.backup.restore._move", full)
    words = r"rows are restored, but \S+/new/models is not .*No space .*another empty database"
    await refused(target, backup, StorageError, words)


def changed_manifest(backup: Path, **changes: object) -> None:
    path = backup / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


async def refused(target: Settings, backup: Path, kind: type[BabylonError], words: str) -> None:
    with pytest.raises(kind, match=words):
        await restore(target.database, target.home, backup)


async def test_a_damaged_or_incomplete_backup_is_refused_by_name(
    backup: Path, target: Settings
) -> None:
    weights = backup / "home" / "models" / "tiny" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + b"x")
    await refused(target, backup, StorageError, r"tiny/model.safetensors has sha256 .* expected")
    weights.unlink()
    await refused(target, backup, StorageError, r"tiny/model.safetensors is missing")
    weights.write_bytes(content)
    table = backup / "tables" / "babylon.policies.zst"
    table.write_bytes(table.read_bytes() + b"x")
    await refused(target, backup, StorageError, r"babylon.policies.zst has sha256")
    await refused(target, backup / "tables", StorageError, r"tables is no backup .*babylon backup")
    changed_manifest(backup, files={"../secret": "0"})
    await refused(target, backup, StorageError, r"a file outside of it: ../secret")
    assert not target.home.root.exists()


async def test_a_newer_schema_and_a_target_with_data_are_refused_by_name(
    backup: Path, target: Settings, settings: Settings
) -> None:
    (target.home.checkpoints / "mine").mkdir(parents=True)
    await refused(target, backup, StorageError, r"new is not empty, it has checkpoints/")
    shutil.rmtree(target.home.root)
    target.home.root.mkdir()
    target.home.checkpoints.touch()
    await refused(target, backup, StorageError, r"new is not empty, it has a file checkpoints")
    shutil.rmtree(target.home.root)
    used = settings.replace(home=target.home.root)
    await refused(used, backup, DatabaseError, r'is not empty, "babylon"."\w+" has rows')
    changed_manifest(backup, revision="9999")
    await refused(target, backup, DatabaseError, "version 9999, .*install a newer babylon-rl")
    changed_manifest(backup, format=99)
    await refused(target, backup, StorageError, "format 99")


async def test_of_a_games_database_only_our_schema_is_backed_up_and_restored_beside_the_game(
    postgres: Any, blank_database_url: str, tmp_path: Path
) -> None:
    async def game(url: str) -> None:
        connection = await asyncpg.connect(url)
        await connection.execute("CREATE TABLE trajectories (secret text)")
        await connection.execute("INSERT INTO trajectories VALUES ('of the game')")
        await connection.close()

    await game(blank_database_url)
    settings = load_settings(database={"url": blank_database_url}, home=tmp_path / "home")
    async with open_store(settings, migrate=True) as store:
        base = save_tiny_policy(tmp_path / "outside", seed=0)
        await ensure_base(store, uri=str(base), base_model="t", digest=checkpoint_digest(str(base)))
        manifest = await back_up(store, tmp_path / "backup")
    assert not manifest.ours and not any(not table.ours for table in manifest.tables)
    async for url in fresh_database(postgres, "template0"):
        target = load_settings(database={"url": url}, home=tmp_path / "new")
        await refused(target, tmp_path / "backup", DatabaseError, "restore the game's .* first")
        await game(url)
        (tmp_path / "outside").rename(tmp_path / "away")
        words = r"model outside the home, and .*/outside is missing here: copy"
        await refused(target, tmp_path / "backup", StorageError, words)
        (tmp_path / "away").rename(tmp_path / "outside")
        await restore(target.database, target.home, tmp_path / "backup")
        async with open_store(target) as store:
            assert not store.game_tables_ours
            assert (await champion(store))[0].uri == str(base)


async def test_a_backup_does_not_depend_on_where_the_games_tables_are_read(
    store: Store, tmp_path: Path
) -> None:
    elsewhere = replace(store, game_tables_ours=False)  # as with GAME_DATABASE_URL
    assert (await back_up(elsewhere, tmp_path / "backup")).ours


async def test_a_backup_says_which_checkpoint_was_damaged_before(
    system: Settings, store: Store, tmp_path: Path
) -> None:
    base = save_tiny_policy(system.home.models / "tiny", seed=0)
    await ensure_base(store, uri=str(base), base_model="t", digest=checkpoint_digest(str(base)))
    (base / "config.json").write_text("{}")
    manifest = await back_up(store, tmp_path / "backup")
    assert manifest.problems == [f"policy 0: {base} was changed after its commit"]
    with pytest.raises(StorageError, match="backup exists: a backup never overwrites"):
        await back_up(store, tmp_path / "backup")
    with pytest.raises(StorageError, match="lies in the home"):
        await back_up(store, system.home.root / "backup")


async def test_a_backup_holds_what_only_the_object_store_holds_and_goes_into_another_store(
    system: Settings, store: Store, target: Settings, tmp_path: Path
) -> None:
    bucket, second = f"file://{tmp_path}/bucket", f"file://{tmp_path}/second"
    here, there = Home(system.home.root, bucket), Home(tmp_path / "another machine", bucket)
    made = save_tiny_policy(there.models / "tiny", seed=0)
    uri = there.reference(made)
    publish(there, made)
    (there.checkpoints / "progress" / "w-e1").mkdir(parents=True)
    (there.checkpoints / "progress" / "w-e1" / "progress.pt").write_bytes(b"an update that goes on")
    publish(there, there.checkpoints / "progress" / "w-e1")
    rows = there.artifacts / "w" / "rows-0123.parquet"
    rows.parent.mkdir(parents=True)
    rows.write_bytes(b"rows")
    publish(there, rows)
    await ensure_base(store, uri=uri, base_model="t", digest=checkpoint_digest(str(made)))
    assert not (here.models / "tiny").exists()
    manifest = await back_up(replace(store, home=here), tmp_path / "backup")
    assert manifest.problems == []
    assert not (tmp_path / "backup" / "home" / "checkpoints" / "progress").exists()
    restored = Home(tmp_path / "new", second)
    await restore(target.database, restored, tmp_path / "backup")
    third = Home(tmp_path / "a third machine", second)
    path = fetch(third, third.models / "tiny")
    assert checkpoint_digest(str(path)) == checkpoint_digest(str(made))
    assert exists(third, third.artifacts / "w" / "rows-0123.parquet")
