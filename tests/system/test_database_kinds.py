"""Databases that users have: TLS, several hosts, a replica, the game elsewhere or otherwise."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest

from babylon.core.artifacts import read_artifact
from babylon.core.errors import DatabaseError
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.core.windows import last_complete_window
from babylon.migrations import VERSIONS
from babylon.ops.up.prefect_setup import PREFECT_DATABASE, prefect_database
from babylon.recorder.trajectory import TrajectoryRecorder
from babylon.stages.checked_rows import CheckedRows
from babylon.stages.collect import collect_window
from babylon.stages.readiness import window_reports
from babylon.store import open_store
from babylon.store.connection import read_clock
from babylon.store.late import note_late
from babylon.store.postgres_programs import binaries
from babylon.store.scores import list_scores
from babylon.store.windows import claim_window
from tests.conftest import real_rows
from tests.integration.game import WINDOW, claim, insert_real_window, insert_trajectories
from tests.other_postgres import PASSWORD, OtherPostgres

GAME = (VERSIONS / "0001_game_tables.sql").read_text()
WITH_TLS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a CA (``ca.crt``) and a server's certificate for the name localhost."""
    folder = tmp_path_factory.mktemp("ca")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("req", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    for name in ("ca", "other"):
        subject = ("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt")
        openssl(*new, "-x509", "-days", "2", *subject)
    openssl(*new, "-subj", "/CN=localhost", "-keyout", "server.key", "-out", "server.csr")
    (folder / "names").write_text("subjectAltName=DNS:localhost")
    by = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    openssl("x509", "-req", "-in", "server.csr", "-days", "2", *by, "-out", "server.crt")
    return folder


@pytest.fixture(scope="module")
def encrypted(authority: Path) -> Iterator[OtherPostgres]:
    """A server that refuses connections without TLS."""
    server = OtherPostgres(WITH_TLS[-1], "ssl=on")
    with server.made():
        for name in ("server.crt", "server.key"):
            shutil.copy(authority / name, server.data / name)
            (server.data / name).chmod(0o600)
            shutil.chown(server.data / name, server.data.owner(), server.data.group())
        (server.data / "pg_hba.conf").write_text("hostssl all all all scram-sha-256\n")
        with server.running():
            yield server


@pytest.mark.skipif(not WITH_TLS, reason="needs Postgres with TLS: apt-get install postgresql")
@pytest.mark.parametrize(
    ("host", "parameters", "problem"),
    [
        ("localhost", "", None),
        ("localhost", "sslmode=require", None),
        ("127.0.0.1", "sslmode=verify-ca&sslrootcert={ca}", None),
        ("localhost", "sslmode=verify-full&sslrootcert={ca}", None),
        ("localhost", "sslaccept=strict&sslcert={ca}", None),
        ("127.0.0.1", "sslaccept=accept_invalid_certs&sslcert={other}", None),
        ("localhost", "sslmode=disable", "refuses the connection"),
        ("127.0.0.1", "sslmode=verify-full&sslrootcert={ca}", "IP address mismatch"),
        ("localhost", "sslmode=verify-ca&sslrootcert={other}", "certificate verify failed"),
        ("localhost", "sslaccept=strict", "certificate verify failed"),
        ("localhost", "sslmode=verify-full&sslrootcert=/absent.crt", "No such file"),
    ],
)
async def test_encryption_is_what_the_url_asks_for(
    host: str,
    parameters: str,
    problem: str | None,
    encrypted: OtherPostgres,
    authority: Path,
    tmp_path: Path,
) -> None:
    parameters = parameters.format(ca=authority / "ca.crt", other=authority / "other.crt")
    url = f"postgresql://babylon:{PASSWORD}@{host}:{encrypted.port}/postgres?{parameters}"
    settings = load_settings(database={"url": url}, home=tmp_path)
    if problem is None:
        async with open_store(settings, migrate=True) as store:
            query = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
            assert await store.pool.fetchval(query)
        return
    with pytest.raises(DatabaseError, match=problem) as caught:
        async with open_store(settings):
            pass
    assert PASSWORD not in str(caught.value)


# As Prefect's server opens its database.
ITS_DATABASE = """
import asyncio, os
from prefect.server.database.configurations import AsyncPostgresConfiguration

async def main():
    url = os.environ["PREFECT_SERVER_DATABASE_CONNECTION_URL"]
    engine = await AsyncPostgresConfiguration(connection_url=url).engine()
    async with engine.connect() as connection:
        query = "SELECT current_database() FROM pg_stat_ssl WHERE ssl AND pid = pg_backend_pid()"
        print((await connection.exec_driver_sql(query)).scalar())

asyncio.run(main())
"""


@pytest.mark.skipif(not WITH_TLS, reason="needs Postgres with TLS: apt-get install postgresql")
@pytest.mark.parametrize(
    ("host", "parameters", "answers"),
    [
        ("localhost", "sslmode=require", True),
        ("localhost", "sslmode=verify-full&sslrootcert={ca}", True),
        ("localhost", "sslaccept=strict&sslcert={ca}", True),
        ("127.0.0.1", "sslmode=verify-ca&sslrootcert={ca}", True),
        ("127.0.0.1", "sslmode=verify-full&sslrootcert={ca}", False),  # another name
        ("localhost", "sslaccept=strict", False),  # another authority
    ],
)
async def test_prefects_server_encrypts_as_the_url_asks(
    host: str,
    parameters: str,
    answers: bool,
    encrypted: OtherPostgres,
    authority: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(PREFECT_DATABASE, raising=False)  # of a harness in this process
    place = f"postgresql://babylon:{PASSWORD}@{host}:{encrypted.port}/postgres"
    settings = load_settings(database={"url": place}, home=tmp_path)
    url = f"{place}?{parameters.format(ca=authority / 'ca.crt')}"
    async with open_store(settings, migrate=True) as store:
        named = await prefect_database(store, url)
    command = [sys.executable, "-c", ITS_DATABASE]
    environment = os.environ | named | {"PREFECT_HOME": str(tmp_path)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (found.stdout.strip() == "postgres_prefect") is answers, found.stderr[-2000:]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[OtherPostgres, OtherPostgres]]:
    """A primary with a migrated database, and a streaming replica of it."""
    primary = OtherPostgres(binaries())
    with primary.made():
        standby = OtherPostgres(binaries(), copy_of=primary)
        with standby.made(), primary.running(), standby.running():
            yield primary, standby


async def migrated(primary: OtherPostgres, tmp_path: Path) -> Settings:
    settings = load_settings(database={"url": primary.url("postgres")}, home=tmp_path)
    async with open_store(settings, migrate=True):
        return settings


async def test_the_writable_host_is_found(
    pair: tuple[OtherPostgres, OtherPostgres], tmp_path: Path
) -> None:
    primary, standby = pair
    await migrated(primary, tmp_path)
    hosts = f"127.0.0.1:1,127.0.0.1:{standby.port},127.0.0.1:{primary.port}"
    url = f"postgresql://babylon:{PASSWORD}@{hosts}/postgres"
    async with open_store(load_settings(database={"url": url}, home=tmp_path)) as store:
        assert not await store.pool.fetchval("SELECT pg_is_in_recovery()")
    nowhere = url.replace(str(primary.port), "2")
    with pytest.raises(DatabaseError, match=r"no database answers at 127\.0\.0\.1:1,"):
        async with open_store(load_settings(database={"url": nowhere}, home=tmp_path)):
            pass


async def test_a_replica_is_read_and_its_primary_written(
    pair: tuple[OtherPostgres, OtherPostgres], tmp_path: Path
) -> None:
    """The replica replays only after a while: the collection waits until it has all rows."""
    primary, standby = pair
    settings = await migrated(primary, tmp_path)
    settings = settings.replace(database={"game_url": standby.url("postgres")})
    async with open_store(settings) as store:
        assert store.game_tables_ours and store.records
        await store.game.execute("SELECT pg_wal_replay_pause()")
        await insert_real_window(store)
        held = await claim(store)

        async def go_on() -> None:
            await asyncio.sleep(0.5)
            assert not await store.game.fetchval("SELECT count(*) FROM trajectories")
            await store.game.execute("SELECT pg_wal_replay_resume()")

        collected, _ = await asyncio.gather(
            collect_window(store, settings.home, held, WINDOW), go_on()
        )
        assert collected.artifact.rows == 15
        TrajectoryRecorder(store)


async def test_a_replica_of_a_game_elsewhere_is_waited_for_until_now(
    pair: tuple[OtherPostgres, OtherPostgres], tmp_path: Path
) -> None:
    """A row that is written just after the window is in time, and the replica lags behind it."""
    primary, standby = pair
    settings = await migrated(primary, tmp_path)
    settings = settings.replace(database={"game_url": standby.url("postgres")})
    async with open_store(settings) as same:
        store = replace(same, records=False)  # as of a database that we do not write
        window = last_complete_window((await read_clock(store)).now)
        started = f"{window.end - timedelta(minutes=1):%Y-%m-%dT%H:%M:%S}"
        written = {"trajectoryId": "before", "startTime": started, "windowId": None}
        await store.pool.execute('TRUNCATE "User", trajectories')
        await insert_trajectories(store, written, {"trajectoryId": "just now"})
        while not await store.game.fetchval("SELECT count(*) = 2 FROM trajectories"):
            await asyncio.sleep(0.05)
        await store.game.execute("SELECT pg_wal_replay_pause()")
        await store.pool.execute(
            'UPDATE trajectories SET "startTime" = $1::text::timestamp, "windowId" = NULL', started
        )
        held = await claim_window(store, window, owner="test", lease_s=60)

        async def go_on() -> None:
            await asyncio.sleep(0.5)
            await store.game.execute("SELECT pg_wal_replay_resume()")

        collected, _ = await asyncio.gather(
            collect_window(store, settings.home, held, window), go_on()
        )
    assert collected.artifact.rows == 2


@pytest.fixture
async def game_url(blank_database_url: str) -> AsyncIterator[str]:
    """A game's own database, with the rows of a real window."""
    game = await asyncpg.connect(blank_database_url)
    await game.execute(GAME)
    for name, table in (
        ("users", "User"),
        ("trajectories", "trajectories"),
        ("llm_call_logs", "llm_call_logs"),
        ("market_outcomes", "market_outcomes"),
    ):
        await game.executemany(
            f'INSERT INTO "{table}" SELECT * FROM json_populate_record(NULL::"{table}", $1)',
            [(json.dumps(row),) for row in real_rows(name)],
        )
    yield blank_database_url
    await game.close()


async def test_the_games_tables_may_be_in_another_database(
    database_url: str, game_url: str, tmp_path: Path
) -> None:
    settings = load_settings(
        database={"url": database_url, "game_url": game_url}, home=tmp_path / "home"
    )
    async with open_store(settings) as store:
        assert (store.game_tables_ours, store.records, store.game_problem) == (False, False, "")
        (report,) = await window_reports(store, settings.windows, CheckedRows(settings.quality))
        assert (report.window_id, report.trajectories, report.agents) == (WINDOW.id, 15, 5)
        await store.pool.execute("INSERT INTO babylon.trained VALUES ($1, 'w', 'b')", first_id())
        held = await claim(store)
        collected = await collect_window(store, settings.home, held, WINDOW)
        ids = read_artifact(settings.home, collected.artifact)["trajectory_id"].to_list()
        assert len(ids) == 14 and first_id() not in ids
        await store.pool.execute(
            "UPDATE babylon.windows SET state = 'deployed', collected_at = now()"
        )
        assert await note_late(store) == 14
        await store.pool.execute(
            "INSERT INTO babylon.scores (window_id, trajectory_id, scorer, score, components)"
            " VALUES ($1, $2, 'heuristic', 0.5, '{}')",
            WINDOW.id,
            first_id(),
        )
        (score,) = await list_scores(store, WINDOW.id)
        assert score.agent_id == real_rows("trajectories")[0]["agentId"]
        with pytest.raises(DatabaseError, match="GAME_DATABASE_URL, which is only read"):
            TrajectoryRecorder(store)


def first_id() -> str:
    return str(real_rows("trajectories")[0]["trajectoryId"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ('DROP COLUMN "scenarioId"', 'trajectories."scenarioId" is missing (text)'),
        ('DROP COLUMN "isEvaluation"', 'trajectories."isEvaluation" is missing (boolean)'),
        (
            'ALTER "startTime" TYPE timestamptz',
            'trajectories."startTime" is timestamptz, not timestamp without time zone',
        ),
        (
            'ALTER "agentId" TYPE uuid USING gen_random_uuid()',
            'trajectories."agentId" is uuid, not text',
        ),
        ('RENAME COLUMN "stepsJson" TO steps', 'trajectories."stepsJson" is missing (JSON)'),
    ],
)
async def test_a_column_that_is_missing_or_of_another_kind_is_named(
    change: str, named: str, game_url: str, tmp_path: Path
) -> None:
    game = await asyncpg.connect(game_url)
    await game.execute(
        'ALTER TABLE trajectories DROP CONSTRAINT "trajectories_agentId_fkey";'
        f"ALTER TABLE trajectories {change}"
    )
    await game.close()
    settings = load_settings(database={"url": game_url}, home=tmp_path)
    async with open_store(settings, migrate=True) as store:
        with pytest.raises(DatabaseError) as caught:
            await window_reports(store, settings.windows, CheckedRows(settings.quality))
    assert named in str(caught.value) and "\n" not in str(caught.value)


async def test_jsonb_and_numeric_are_read_as_text_and_double(game_url: str, tmp_path: Path) -> None:
    settings = load_settings(database={"url": game_url}, home=tmp_path)
    game = await asyncpg.connect(game_url)
    async with open_store(settings, migrate=True) as store:
        held = await claim(store)
        before = await collect_window(store, settings.home, held, WINDOW)
    json_columns = ("stepsJson", "metricsJson", "metadataJson", "rewardComponentsJson")
    await game.execute(
        "".join(
            f'ALTER TABLE trajectories ALTER "{name}" TYPE jsonb USING "{name}"::jsonb;'
            for name in json_columns
        )
        + 'ALTER TABLE trajectories ALTER "totalReward" TYPE numeric;'
        'ALTER TABLE llm_call_logs ALTER "messagesJson" TYPE jsonb USING "messagesJson"::jsonb'
    )
    await game.close()
    async with open_store(settings) as store:
        held = await claim_window(store, WINDOW, owner="test", lease_s=60)
        after = await collect_window(store, settings.home, held, WINDOW)
    one, two = (
        read_artifact(settings.home, before.artifact),
        read_artifact(settings.home, after.artifact),
    )
    assert one.schema == two.schema
    assert one["total_reward"].to_list() == pytest.approx(two["total_reward"].to_list())
    assert [json.loads(text) for text in one["steps_json"]] == [
        json.loads(text) for text in two["steps_json"]
    ]


async def test_reads_of_the_game_lock_nothing_and_wait_for_no_writer(
    game_url: str, tmp_path: Path
) -> None:
    """Every lock that a running game takes is held meanwhile; and ours is the weakest there is."""
    settings = load_settings(database={"url": game_url}, home=tmp_path)
    game = await asyncpg.connect(game_url)
    async with open_store(settings, migrate=True) as store:
        held = await claim(store)
        async with game.transaction():
            await game.execute("LOCK TABLE trajectories, llm_call_logs IN EXCLUSIVE MODE")
            async with asyncio.timeout(30):
                await window_reports(store, settings.windows, CheckedRows(settings.quality))
                await note_late(store)
                await collect_window(store, settings.home, held, WINDOW)
        async with (
            store.game.acquire() as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            await connection.fetch('SELECT "stepsJson" FROM trajectories')
            await game.execute(
                "SET lock_timeout = '1s'; BEGIN;"
                " LOCK TABLE trajectories, llm_call_logs IN EXCLUSIVE MODE; ROLLBACK"
            )
    await game.close()
