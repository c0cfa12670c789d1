"""The embedded server: shared by processes, recovered after any of them is killed."""

import asyncio
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import psutil
import pytest

from babylon.core.errors import DatabaseError
from babylon.core.settings_loading import load_settings
from babylon.ops.up import down
from babylon.store import open_store
from babylon.store.embedded import EmbeddedPostgres, _make
from babylon.store.server import database_url, kept_running

CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2  # their numbers in capabilities(7)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")

USER_PROCESS = """
import sys, time
from pathlib import Path
from babylon.store.embedded import EmbeddedPostgres
server = EmbeddedPostgres(Path(sys.argv[1]))
server.acquire()
print(server.url(), flush=True)
sys.stdin.read()
server.release()
"""

# Output of initdb on a full disk.
FULL_DISK = """\
The default text search configuration will be set to "english".

creating configuration files ... ok
running bootstrap script ... 2026-11-21 12:46:43.230 UTC [25419] FATAL:  could not extend file \
"base/1/2691": wrote only 4096 of 8192 bytes at block 10
2026-11-21 12:46:43.230 UTC [25419] HINT:  Check free disk space.
2026-11-21 12:46:43.230 UTC [25419] PANIC:  cannot abort transaction 1, it was already committed
Aborted
child process exited with exit code 134
initdb: removing contents of data directory "/home/postgres/data.unfinished"
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cluster for the module, in a directory closed to others; each test leaves it stopped."""
    closed = tmp_path_factory.mktemp("closed")
    closed.chmod(0o700)
    home = closed / "home"
    before = _zombies()
    yield home
    assert _postmaster(EmbeddedPostgres(home)) is None
    assert _zombies() <= before
    shutil.rmtree(home)


def _zombies() -> set[psutil.Process]:
    return {child for child in psutil.Process().children() if child.status() == "zombie"}


def _postmaster(server: EmbeddedPostgres) -> psutil.Process | None:
    """Return the running postmaster of this cluster, found by its command line."""
    for process in psutil.process_iter():
        try:
            if str(server.data) in process.cmdline():
                return process
        except psutil.NoSuchProcess:
            continue
    return None


def _capabilities(process: psutil.Process) -> set[int]:
    """Return the numbers of all capabilities that the process has or passes on."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = {int(mask, 16) for mask in re.findall(r"^Cap(?:Prm|Eff|Inh|Amb):\s(\w+)", status, re.M)}
    return {number for number in range(64) for mask in found if mask >> number & 1}


def _kill_postmaster(server: EmbeddedPostgres) -> None:
    postmaster = _postmaster(server)
    assert postmaster is not None
    postmaster.kill()
    postmaster.wait(10)


def _query(url: str, sql: str) -> Any:
    async def run() -> Any:
        connection = await asyncpg.connect(url)
        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    return asyncio.run(run())


def _user(home: Path) -> "subprocess.Popen[str]":
    """Start a process that uses the server until its standard input closes."""
    return subprocess.Popen(
        [sys.executable, "-c", USER_PROCESS, str(home)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def running_postgres(home: Path) -> Iterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(home)
    server.acquire()
    try:
        yield server
    finally:
        server.release()


def _url(process: "subprocess.Popen[str]") -> str:
    """Return the URL that the process prints when its server runs."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _end(process: "subprocess.Popen[str]") -> None:
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_data_port_and_password_outlive_a_restart(home: Path) -> None:
    with running_postgres(home) as server:
        url = server.url("postgres")
        _query(url, "CREATE TABLE kept AS SELECT 42 AS answer")
        postmaster = _postmaster(server)
        assert postmaster is not None and postmaster.uids().effective != 0
    assert _postmaster(server) is None
    with running_postgres(home) as server:
        assert server.url("postgres") == url
        assert _query(url, "SELECT answer FROM kept") == 42
        assert _query(url, "SHOW max_wal_size") == "512MB"
        with pytest.raises(asyncpg.InvalidPasswordError):
            _query(url.replace(url.split(":")[2].split("@")[0], "wrong"), "SELECT 1")
    (server.directory / "port").write_text("")  # as a full disk leaves it
    with running_postgres(home) as server:
        assert _query(server.url("postgres"), "SELECT answer FROM kept") == 42


def test_the_last_user_stops_the_server(home: Path) -> None:
    first, second = EmbeddedPostgres(home), EmbeddedPostgres(home)
    first.acquire()
    second.acquire()
    assert first.release() is False
    assert _query(second.url(), "SELECT 1") == 1
    assert second.release() is True
    assert second.release() is False


def test_processes_that_start_at_once_share_one_new_server(tmp_path: Path) -> None:
    users = [_user(tmp_path) for _ in range(4)]
    urls = {_url(process) for process in users}
    assert len(urls) == 1
    assert _query(urls.pop(), "SELECT 1") == 1
    for process in users:
        _end(process)
    assert _postmaster(EmbeddedPostgres(tmp_path)) is None


def test_a_killed_starter_leaves_a_server_that_the_next_user_joins_and_stops(home: Path) -> None:
    process = _user(home)
    url = _url(process)
    process.kill()
    process.communicate()
    started = _postmaster(EmbeddedPostgres(home))
    with running_postgres(home) as server:
        assert server.url() == url
        assert _postmaster(server) == started
    assert _postmaster(server) is None


def test_down_stops_a_server_that_only_killed_processes_used(home: Path) -> None:
    settings = load_settings(home=home)

    def stopped() -> list[str]:
        return asyncio.run(down(settings.home, settings.database, []))

    killed, lives = _user(home), _user(home)
    _url(killed), _url(lives)
    killed.kill()
    killed.communicate()
    assert stopped() == []  # somebody uses it
    assert _postmaster(EmbeddedPostgres(home)) is not None
    lives.kill()
    lives.communicate()
    assert stopped() == ["postgres"]
    assert _postmaster(EmbeddedPostgres(home)) is None
    assert stopped() == []


def test_a_killed_postmaster_is_replaced_and_no_committed_row_is_lost(home: Path) -> None:
    with running_postgres(home) as server:
        _query(server.url("postgres"), "CREATE TABLE survivors AS SELECT 7 AS n")
        _kill_postmaster(server)
        with running_postgres(home) as next_server:
            assert _query(next_server.url("postgres"), "SELECT n FROM survivors") == 7
        assert _postmaster(server) is not None  # the first user has not left yet


def test_a_killed_postmaster_whose_port_still_answers_does_not_run(home: Path) -> None:
    with running_postgres(home) as server:
        _kill_postmaster(server)
        with socket.create_server(("127.0.0.1", server._status()[1])):
            assert not server._accepts()


def test_a_server_that_another_process_replaced_stays_no_zombie(home: Path) -> None:
    before = _zombies()
    with running_postgres(home) as server:
        started = _postmaster(server)
        assert started is not None
        started.kill()
        other = _user(home)
        assert _url(other)
        assert _zombies() - before == {started}
        assert not server.revive() and _zombies() == before
        _end(other)


async def test_a_server_that_dies_in_use_restarts_at_the_same_address(
    home: Path,
) -> None:
    settings = load_settings(home=home, database={"url": None})
    async with kept_running(settings.database, settings.home), asyncio.timeout(60):
        server = EmbeddedPostgres(home)
        url = server.url("postgres")
        for _ in range(2):
            while (killed := _postmaster(server)) is None:  # it writes its pid file again
                await asyncio.sleep(0.05)
            killed.kill()  # the watch reaps it, although another instance started it
            # Its children may outlive it for a moment, under its command line.
            while server._status()[0] in (0, killed.pid) or not server._accepts():
                await asyncio.sleep(0.05)
            assert server.url("postgres") == url
        connection = await asyncpg.connect(url)
        assert await connection.fetchval("SELECT 7") == 7
        await connection.close()
    assert _postmaster(server) is None


def test_a_pid_file_that_names_a_stranger_is_no_obstacle(home: Path) -> None:
    with running_postgres(home) as server:
        lines = (server.data / "postmaster.pid").read_text().splitlines()
        _kill_postmaster(server)
    lines[0] = str(os.getpid())
    (server.data / "postmaster.pid").write_text("\n".join(lines) + "\n")
    with running_postgres(home) as server:
        assert _query(server.url(), "SELECT 1") == 1


def test_a_taken_port_is_replaced(home: Path) -> None:
    with running_postgres(home) as server:
        port = int(server.url().split(":")[3].split("/")[0])
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind(("127.0.0.1", port))
        squatter.listen()
        with running_postgres(home) as server:
            assert f":{port}/" not in server.url()
            assert _query(server.url(), "SELECT 1") == 1


def test_a_suspended_user_keeps_the_server_while_others_come_and_go(home: Path) -> None:
    process = _user(home)
    url = _url(process)
    process.send_signal(signal.SIGSTOP)
    with running_postgres(home):
        pass
    assert _query(url, "SELECT 1") == 1
    process.send_signal(signal.SIGCONT)
    _end(process)


def test_an_unusable_cluster_is_reported_with_the_servers_own_words(home: Path) -> None:
    version = EmbeddedPostgres(home).data / "PG_VERSION"
    sound = version.read_text()
    version.write_text("7\n")
    started = time.monotonic()
    try:
        with pytest.raises(DatabaseError, match=r"does not start[\s\S]*initialized by PostgreSQL"):
            EmbeddedPostgres(home).acquire()
        assert time.monotonic() - started < 20
    finally:
        version.write_text(sound)


def test_a_cluster_that_cannot_be_made_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "transcript").write_text(FULL_DISK)
    arguments = {"args": ["/bin/sh", "-c", "cat transcript; exit 1"], "cwd": tmp_path}
    reason = 'could not extend file "base/1/2691": wrote only 4096 of 8192 bytes at block 10'
    with pytest.raises(DatabaseError) as told:
        _make(Path("/home/postgres/data"), arguments)
    assert str(told.value).startswith(
        f"cannot make the embedded Postgres in /home/postgres/data ({reason}): free the disk,"
    )


def test_a_failed_setup_leaves_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: Path, arguments: dict[str, Any], text: str = "") -> None:
        _make(data, arguments, text and "SELECT 1/0")

    monkeypatch.setattr("babylon.store.embedded._make", broken)
    server = EmbeddedPostgres(tmp_path)
    with pytest.raises(DatabaseError, match=r"\(division by zero\)"):
        server.acquire()
    assert not server.data.exists()


@as_root
async def test_one_capability_lets_postgres_pass_roots_closed_directories(home: Path) -> None:
    async with open_store(load_settings(home=home)) as store:
        assert await store.pool.fetchval("SELECT count(*) FROM babylon.windows") == 0
        postmaster = _postmaster(EmbeddedPostgres(home))
        assert postmaster is not None
        for process in (postmaster, *postmaster.children()):
            assert set(process.uids()) == {pwd.getpwnam("nobody").pw_uid}
            assert _capabilities(process) in ({CAP_DAC_READ_SEARCH}, {CAP_DAC_OVERRIDE})
    assert home.parent.stat().st_mode & 0o777 == 0o700


@as_root
def test_capabilities_are_given_only_for_closed_directories(
    postgres: EmbeddedPostgres,
) -> None:
    postmaster = _postmaster(postgres)
    assert postmaster is not None
    needed = (*Path(postmaster.exe()).parents, *postgres.data.parents)
    closed = any(not step.stat().st_mode & 0o001 for step in needed)
    assert bool(_capabilities(postmaster)) == closed


@as_root
def test_root_without_setpcap_gets_an_error_that_names_the_closed_directory(tmp_path: Path) -> None:
    limited = ["setpriv", "--inh-caps=-all", "--bounding-set=-setpcap"]
    command = [*limited, sys.executable, "-c", USER_PROCESS, str(tmp_path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    told = re.search(r"cannot enter (\S+), .*`chmod o\+x \1`", done.stderr)
    assert told and not Path(told[1]).stat().st_mode & 0o001, done.stderr


@as_root
def test_root_runs_the_server_as_the_owner_of_the_home(tmp_path: Path) -> None:
    os.chown(tmp_path, 1, 1)
    with running_postgres(tmp_path) as server:
        postmaster = _postmaster(server)
        assert postmaster is not None and postmaster.uids().effective == 1


async def test_the_embedded_store_migrates_itself(home: Path) -> None:
    async with open_store(load_settings(home=home)) as store:
        assert store.game_tables_ours and store.has_game_tables


async def test_a_cancelled_start_leaves_no_server_behind(home: Path) -> None:
    async def use() -> None:
        settings = load_settings(home=home)
        async with database_url(settings.database, settings.home):
            await asyncio.sleep(60)

    for delay_s in (0.0, 0.05, 0.5):
        task = asyncio.create_task(use())
        await asyncio.sleep(delay_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert _postmaster(EmbeddedPostgres(home)) is None
