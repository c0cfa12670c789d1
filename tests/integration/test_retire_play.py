"""Removal of old play on a real Postgres and a real disk, over ninety simulated days."""

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import polars as pl
import pytest

from babylon.core.artifacts import write_artifact
from babylon.core.home import Home
from babylon.core.settings import Settings
from babylon.core.types import Scored
from babylon.core.windows import Window, WindowState, window_at
from babylon.stages import retire_play as stage
from babylon.stages.retention import sweep
from babylon.stages.retire_play import RetiredPlay, retire_play
from babylon.store import Store
from babylon.store.backup_lock import backup_lock
from babylon.store.calls import insert_calls
from babylon.store.late import note_late
from babylon.store.observations import MarketObservation, ObservedValue, ValueKind
from babylon.store.observations import keep as keep_observations
from babylon.store.play_in_use import remove_play, window_uses
from babylon.store.policies import ensure_base
from babylon.store.population import MemberRow, add_generation
from babylon.store.published import PublishedFile, record_published
from babylon.store.windows import claim_window, get_window, set_state
from tests.integration.test_checks import call

_PLAYED = """
WITH agent AS (INSERT INTO "User" (id) VALUES ('a') ON CONFLICT DO NOTHING)
INSERT INTO trajectories (id, "trajectoryId", "agentId", "startTime", "endTime", "durationMs",
    "windowId", "stepsJson", "rewardComponentsJson", "metricsJson", "metadataJson", "totalReward",
    "episodeLength", "finalStatus", "updatedAt", "createdAt")
SELECT name, name, 'a', $3::timestamp, $3, 1, $2, '[]', '{}', '{}', '{}', 0, 1, 'done', $3, $3
FROM unnest($1::text[]) AS name
"""
START = datetime(2026, 1, 1, tzinfo=UTC)
PLAYERS = 10
ROWS = ("calls", "scores", "rejections", "collected", "late", "judgments")


def day(number: int) -> Window:
    return Window(START + timedelta(days=number))


async def play(store: Store, settings: Settings, window: Window, *, trained: bool = True) -> None:
    """Record the trajectories of a window with one call each, and train it in its time."""
    ids = [f"{window.id} {number}" for number in range(PLAYERS)]
    await store.pool.execute(_PLAYED, ids, window.id, window.start.replace(tzinfo=None))
    made = [
        replace(
            call("x" * 2000, number=number),
            call_id=name,
            trajectory_id=name,
            started_at=window.start + timedelta(minutes=1),
        )
        for number, name in enumerate(ids)
    ]
    await insert_calls(store, made)
    await store.pool.execute(
        "UPDATE babylon.calls SET recorded_at = started_at WHERE trajectory_id = ANY($1)", ids
    )
    if not trained:
        return
    claim = await claim_window(store, window, owner="me", lease_s=60)
    frame = pl.DataFrame({"trajectory_id": ids, "text": [f"{n} " * 500 for n in range(PLAYERS)]})
    files = [
        write_artifact(settings.home, frame.head(PLAYERS - n), window_id=window.key, stage=stage)
        for n, stage in enumerate(("collected", "validated", "thinned", "scored"))
    ]
    scored = Scored(
        claim=claim, artifact=files[-1], eligible=PLAYERS, agents=3, scorer="h", avg_reward=0.0
    )
    for table in ("scores", "rejections", "collected"):
        columns, values = {
            "scores": ("scorer, score", "'h', 0"),
            "rejections": ("reason, detail", "'short', 'x'"),
            "collected": ("", ""),
        }[table]
        names = ", ".join(filter(None, ("window_id, trajectory_id", columns)))
        chosen = ", ".join(filter(None, ("$1, unnest($2::text[])", values)))
        await store.pool.execute(
            f"INSERT INTO babylon.{table} ({names}) SELECT {chosen}", window.key, ids
        )
    await set_state(store, claim, WindowState.SCORED, scored=scored)
    await store.pool.execute(
        "UPDATE babylon.windows SET updated_at = $2, collected_at = $2, lease_until = NULL,"
        " state = 'rejected' WHERE window_id = $1",
        window.key,
        window.end + timedelta(minutes=5),
    )
    for path in settings.home.artifacts.glob("*.parquet"):
        _age(path)


def _age(path: Path) -> None:
    os.utime(path, (0, 0))


async def sizes(store: Store, settings: Settings) -> dict[str, int]:
    counts = {
        table: await store.pool.fetchval(f"SELECT count(*) FROM babylon.{table}") for table in ROWS
    }
    counts["trajectories"] = await store.pool.fetchval("SELECT count(*) FROM trajectories")
    counts["bytes"] = sum(path.stat().st_size for path in settings.home.artifacts.iterdir())
    return counts


@pytest.fixture
async def ready(store: Store, settings: Settings) -> Settings:
    await ensure_base(store, uri="/base", base_model="tiny")
    return settings


async def retire(store: Store, settings: Settings, now: datetime) -> RetiredPlay:
    return await retire_play(store, settings.home, settings.windows, now=now)


async def test_ninety_days_keep_rows_and_files_flat(store: Store, ready: Settings) -> None:
    seen = {}
    for number in range(90):
        await play(store, ready, day(number))
        await retire(store, ready, day(number).end + timedelta(hours=1))
        seen[number] = await sizes(store, ready)
    full, last = seen[31], seen[89]
    assert full["calls"] == 30 * PLAYERS and full["trajectories"] == 30 * PLAYERS
    assert {name: last[name] for name in full if name != "bytes"} == {
        name: full[name] for name in full if name != "bytes"
    }
    assert last["bytes"] == pytest.approx(full["bytes"], rel=0.05)
    assert len(list(ready.home.artifacts.iterdir())) == 30  # only the scored file of a window
    assert await store.pool.fetchval("SELECT count(*) FROM babylon.windows") == 90
    # the trajectories of a window are not late because `collected` forgot them
    assert await note_late(store) == 0
    window = await get_window(store, day(0).key)
    assert window is not None and window.state == WindowState.REJECTED and window.scored is None


async def test_a_large_window_goes_in_portions(
    store: Store, ready: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million calls in one statement take longer than a query may, and nothing would ever go."""
    await play(store, ready, day(0))
    await store.pool.execute(
        "CREATE FUNCTION few() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " ASSERT (SELECT count(*) FROM gone) <= 4; RETURN NULL; END $$;"
        "CREATE TRIGGER few AFTER DELETE ON trajectories REFERENCING OLD TABLE AS gone"
        " FOR EACH STATEMENT EXECUTE FUNCTION few()"
    )
    monkeypatch.setattr("babylon.store.play_in_use._PLAYS_AT_A_TIME", 4)
    assert (await retire(store, ready, day(60).end)).windows == 1
    assert (await sizes(store, ready))["trajectories"] == 0


class YearsAhead(datetime):
    """A clock that is wrong by years, as after the loss of a battery."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:
        return datetime.now(tz) + timedelta(days=4000)


async def test_a_workers_wrong_clock_removes_nothing(
    store: Store, ready: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = window_at(datetime.now(UTC) - timedelta(days=2))
    await play(store, ready, window)
    before = await sizes(store, ready)
    for module in ("retire_play", "retention"):
        monkeypatch.setattr(f"babylon.stages.{module}.datetime", YearsAhead)
    assert (await retire_play(store, ready.home, ready.windows)).windows == 0
    assert await sizes(store, ready) | {"bytes": 0} == before | {"bytes": 0}
    # The progress of an update that may go on stays too.
    progress = ready.home.progress / f"{window.start:%Y-%m-%dT%H%M}-e1"
    progress.mkdir(parents=True)
    await store.pool.execute("UPDATE babylon.windows SET state = 'failed', updated_at = now()")
    await sweep(store, ready.home, ready.windows.lookback_hours)
    assert progress.is_dir()


async def test_without_retention_everything_stays(store: Store, ready: Settings) -> None:
    await play(store, ready, day(0))
    off = ready.replace(windows={"retention_days": 0})
    before = await sizes(store, ready)
    assert await retire(store, off, day(400).end) == RetiredPlay()
    assert await sizes(store, ready) == before
    shorter = ready.replace(windows={"retention_days": 10, "lookback_hours": 1})
    assert (await retire(store, shorter, day(5).end)).windows == 0
    assert (await retire(store, shorter, day(11).end)).windows == 1


async def test_calls_of_protected_windows_and_of_late_imports_stay(
    store: Store, ready: Settings
) -> None:
    for number in range(3):
        await play(store, ready, day(number))
    await play(store, ready, day(3), trained=False)  # never claimed, and recorded in its time
    await play(store, ready, day(4), trained=False)
    await store.pool.execute(  # imported now
        "UPDATE babylon.calls SET recorded_at = $1 WHERE started_at >= $2",
        day(70).end,
        day(4).start,
    )
    await store.pool.execute(
        "UPDATE babylon.windows SET lease_until = now() + interval '1 hour' WHERE window_id = $1",
        day(1).key,
    )
    imported = f"{day(0).id} 0"  # into a window that was trained in its time
    await store.pool.execute(
        'UPDATE trajectories SET "createdAt" = $1 WHERE "trajectoryId" = $2',
        *(day(69).start.replace(tzinfo=None), imported),
    )
    retired = await retire(store, ready, day(70).end)
    assert (retired.windows, retired.calls) == (2, 3 * PLAYERS)
    rows = await store.pool.fetch('SELECT "trajectoryId" AS id FROM trajectories')
    assert [row["id"] for row in rows if row["id"].startswith(day(0).id)] == [imported]
    left = await store.pool.fetch("SELECT DISTINCT left(trajectory_id, 16) AS w FROM babylon.calls")
    assert {row["w"] for row in left} == {day(1).id, day(4).id}
    # the game's rows of windows that were never claimed are not ours to judge
    found = await store.pool.fetch('SELECT DISTINCT "windowId" AS w FROM trajectories')
    assert {row["w"] for row in found} == {day(n).id for n in (0, 1, 3, 4)}
    assert (await retire(store, ready, day(98).end)).windows == 0
    assert (await retire(store, ready, day(100).end)).windows == 1  # 30 days after the import
    found = await store.pool.fetch('SELECT DISTINCT "windowId" AS w FROM trajectories')
    assert {row["w"] for row in found} == {day(n).id for n in (1, 3, 4)}
    assert (await retire(store, ready, day(101).end)).windows == 0


async def test_a_window_that_is_claimed_meanwhile_and_a_foreign_games_rows_stay(
    store: Store, ready: Settings
) -> None:
    await play(store, ready, day(0))
    async with store.pool.acquire() as other, other.transaction():
        await other.execute("SELECT FROM babylon.windows FOR UPDATE")
        assert await retire(store, ready, day(70).end) == RetiredPlay()
    assert (await sizes(store, ready))["calls"] == PLAYERS  # it will be collected with its calls
    foreign = replace(store, game_tables_ours=False)
    assert (await retire(foreign, ready, day(70).end)).windows == 1
    assert await note_late(store) == 0
    counts = await sizes(store, ready)
    assert (counts["scores"], counts["collected"], counts["trajectories"]) == (0, 0, PLAYERS)


async def test_a_window_that_is_trained_meanwhile_stays(
    store: Store, ready: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await play(store, ready, day(0))
    await play(store, ready, day(1))

    async def trained_meanwhile(store: Store, window: Window, before: datetime) -> bool:
        """A backfill ends window 1 while window 0 is removed, which may take hours."""
        await store.pool.execute(
            "UPDATE babylon.windows SET updated_at = now() WHERE window_id = $1", day(1).key
        )
        return await remove_play(store, window, before)

    monkeypatch.setattr(stage, "remove_play", trained_meanwhile)
    retired = await retire(store, ready, day(70).end)
    assert (retired.windows, retired.calls) == (1, PLAYERS)
    assert (await sizes(store, ready))["collected"] == PLAYERS
    left = await store.pool.fetch("SELECT DISTINCT left(trajectory_id, 16) AS w FROM babylon.calls")
    assert [row["w"] for row in left] == [day(1).id]


async def test_the_truth_of_an_hour_stays_until_its_last_window_goes(
    store: Store, ready: Settings
) -> None:
    first, second = (Window(START + timedelta(minutes=minute), 15) for minute in (0, 15))
    for window in (first, second):
        await play(store, ready, window)
    await store.pool.executemany(
        'INSERT INTO market_outcomes (id, "windowId") VALUES ($1, $2)',
        [
            ("game", first.id),
            (f"{first.id}-price-T", first.id),
            (f"{second.id}-price-T", second.id),
        ],
    )
    lease = "UPDATE babylon.windows SET lease_until = now() + $2::interval WHERE window_id = $1"
    await store.pool.execute(lease, second.id, timedelta(hours=1))
    assert (await retire(store, ready, day(70).end)).windows == 1
    assert await store.pool.fetchval("SELECT count(*) FROM market_outcomes") == 3
    await store.pool.execute(lease, second.id, timedelta(0))
    assert (await retire(store, ready, day(70).end)).windows == 1
    assert await store.pool.fetchval("SELECT count(*) FROM market_outcomes") == 0


async def test_the_intermediate_files_of_a_finished_window_go_at_once_and_of_no_other(
    store: Store, ready: Settings
) -> None:
    await play(store, ready, day(0))
    await play(store, ready, day(1))
    await store.pool.execute(
        "UPDATE babylon.windows SET state = 'scored' WHERE window_id = $1", day(1).key
    )
    young = write_artifact(
        ready.home, pl.DataFrame({"x": [1]}), window_id=day(0).key, stage="collected"
    )
    unknown = write_artifact(
        ready.home, pl.DataFrame({"x": [1]}), window_id=day(7).key, stage="scored"
    )
    _age(Path(ready.home.resolve(unknown.uri)))
    assert await retire(store, ready, day(2).end) == RetiredPlay(files=3)
    names = sorted(path.name for path in ready.home.artifacts.iterdir())
    assert [name.rpartition("-")[0] for name in names] == [
        "2026-01-01T00-00-collected", "2026-01-01T00-00-scored", "2026-01-02T00-00-collected",
        "2026-01-02T00-00-scored", "2026-01-02T00-00-thinned", "2026-01-02T00-00-validated",
        "2026-01-08T00-00-scored",
    ]  # fmt: skip
    assert Path(ready.home.resolve(young.uri)).exists()


async def test_a_file_that_another_host_takes_up_again_stays_in_the_store(
    store: Store, ready: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (Home(root=tmp_path / name, store=f"file://{tmp_path}/bucket") for name in "ab")
    frame, window, list_old = pl.DataFrame({"x": [1]}), day(0), stage._old_files
    claim = await claim_window(store, window, owner="there", lease_s=60)
    written = write_artifact(there, frame, window_id=window.key, stage="scored")
    await set_state(store, claim, WindowState.FAILED, reason="no judge")
    (stored,) = (tmp_path / "bucket").rglob("*.parquet")
    _age(stored)

    def taken_up_meanwhile(home: Home) -> dict[str, list[Path]]:
        """The other host tries the window again and makes the same file, which is there already."""
        found = list_old(home)
        assert write_artifact(there, frame, window_id=window.key, stage="scored") == written
        return found

    monkeypatch.setattr(stage, "_old_files", taken_up_meanwhile)
    uses = await window_uses(store)
    again = await claim_window(store, window, owner="there", lease_s=60)
    assert await stage._remove_files(store, here, uses) == 0 and stored.exists()
    await set_state(store, again, WindowState.FAILED, reason="no judge")
    assert await stage._remove_files(store, here, uses) == 0 and stored.exists()  # another epoch
    async with store.pool.acquire() as other, other.transaction():
        await other.execute("SELECT FROM babylon.windows FOR UPDATE")  # about to claim it
        assert await stage._remove_files(store, here, await window_uses(store)) == 0
    assert await stage._remove_files(store, here, await window_uses(store)) == 1
    assert not stored.exists()


async def test_nothing_is_removed_during_a_backup(store: Store, ready: Settings) -> None:
    await play(store, ready, day(0))
    async with backup_lock(store):
        assert await retire(store, ready, day(70).end) == RetiredPlay()
    assert (await retire(store, ready, day(70).end)).windows == 1


async def test_a_running_experiment_keeps_the_play_since_it_began(
    store: Store, ready: Settings
) -> None:
    await play(store, ready, day(0))
    await store.pool.execute(
        "INSERT INTO babylon.policies (policy_version, parent_version, kind, uri, base_model)"
        " VALUES (1, 0, 'lora', '/one', 'tiny')"
    )
    await store.pool.execute(
        "INSERT INTO babylon.routes (route_version, policy_version, author, reason, created_at,"
        " mode, challenger_version, share, salt)"
        " VALUES (2, 0, 'me', 'ab', $1, 'ab', 1, 0.5, 'salt')",
        day(0).start,
    )
    assert await retire(store, ready, day(70).end) == RetiredPlay(files=3)
    await store.pool.execute(
        "INSERT INTO babylon.routes (route_version, policy_version, author, reason)"
        " VALUES (3, 0, 'me', 'over')"
    )
    assert (await retire(store, ready, day(70).end)).windows == 1


FIRST = PublishedFile(
    repository="owner/play",
    config="trajectories",
    window_id=day(0).id,
    path="trajectories/x.parquet",
    sha256="0",
    bytes=1,
    rows=PLAYERS,
    agents=("a",),
    trajectory_ids=(),
    revision="1",
)


async def test_play_that_another_host_has_not_published_yet_stays(
    store: Store, ready: Settings
) -> None:
    for number in (0, 1):
        await play(store, ready, day(number))
    await record_published(store, [FIRST])
    retired = await retire_play(store, ready.home, ready.windows, now=day(60).start)
    assert retired.windows == 1
    kept = await store.pool.fetch("SELECT DISTINCT window_id FROM babylon.collected")
    assert [row["window_id"] for row in kept] == [day(1).id]
    # Nobody has published for longer than play is kept, so nobody will.
    await store.pool.execute("UPDATE babylon.published SET published_at = $1", day(29).start)
    assert (await retire(store, ready, day(60).start)).windows == 1


async def two_plays_with_a_file_of_the_second(store: Store, ready: Settings) -> None:
    await play(store, ready, day(0))
    await play(store, ready, day(1))
    written = ready.home.datasets / "trajectories" / "2026-01"
    written.mkdir(parents=True)
    (written / "2026-01-02T00-00-train-00000000.parquet").write_bytes(b"not sent yet")


async def test_with_publish_to_the_ledger_alone_says_what_is_published(
    store: Store, ready: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    await two_plays_with_a_file_of_the_second(store, ready)

    async def removed(repository: str | None) -> int:
        retired = await retire_play(
            store, ready.home, ready.windows, repository=repository, now=day(60).start
        )
        return retired.windows

    assert await removed("owner/play") == 0
    assert "2 windows are older than 2026-01-31 and kept until they are published" in caplog.text
    await record_published(store, [FIRST])
    assert await removed("owner/play") == 1


async def test_without_publishing_play_goes_although_the_files_of_the_dataset_are_lost(
    store: Store, ready: Settings
) -> None:
    """Another pod wrote the file of the first window to a disk that is gone."""
    await two_plays_with_a_file_of_the_second(store, ready)
    assert (await retire(store, ready, day(60).start)).windows == 2


async def test_the_trajectories_of_siblings_go_with_the_play_and_their_fitness_stays(
    store: Store, ready: Settings
) -> None:
    await play(store, ready, day(0))
    founder = MemberRow(generation=0, member=0, parent=None, origin="founder", genes={})
    await add_generation(store, [founder])
    await store.pool.execute(
        "INSERT INTO babylon.siblings (window_id, batch_id, generation, member, parent_version,"
        " uri, fitness, trajectory_ids) VALUES ($1, 'b', 0, 0, 0, '', 1.5, '{a,b}')",
        day(0).key,
    )
    await retire(store, ready, day(20).end)
    siblings = "SELECT fitness, trajectory_ids FROM babylon.siblings"
    assert tuple(*await store.pool.fetch(siblings)) == (1.5, ["a", "b"])
    await retire(store, ready, day(60).end)
    assert tuple(*await store.pool.fetch(siblings)) == (1.5, [])


async def test_old_observations_go_also_of_windows_that_nobody_claimed(
    store: Store, ready: Settings
) -> None:
    await play(store, ready, day(2))
    await store.pool.execute(
        "UPDATE babylon.windows SET lease_until = now() + interval '1 hour' WHERE window_id = $1",
        day(2).key,
    )
    seen = [
        ("price", "T", 0),
        ("price", "T", 2),  # of a window in use
        ("price", "T", 40),
        ("probability", "open", 0),
        ("probability", "open", 1),
        ("probability", "ended", 0),
        ("resolution", "ended", 1),
    ]
    async with store.pool.acquire() as connection:
        await keep_observations(connection, [observation(*one) for one in seen])
    await retire(store, ready, day(60).start)
    rows = await store.pool.fetch("SELECT kind, name, window_id FROM babylon.observations")
    assert {(row["kind"], row["name"], row["window_id"]) for row in rows} == {
        ("price", "T", day(2).id),
        ("price", "T", day(40).id),
        ("probability", "open", day(1).id),
        ("probability", "ended", day(0).id),
        ("resolution", "ended", day(1).id),
    }


def observation(kind: str, name: str, number: int) -> MarketObservation:
    window = day(number)
    return MarketObservation(
        kind=ValueKind(kind),
        name=name,
        window_id=window.id,
        question=None if kind == "price" else f"{name}?",
        seen=ObservedValue((window.start, 1.0), (window.start, 1.0)),
    )
