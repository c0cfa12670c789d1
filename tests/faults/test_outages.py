"""The database dies in the middle of a window, or the disk is full: told in one line, nothing half
done, and the next run succeeds."""

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import psutil
import pytest
from pydantic import SecretStr

from babylon.core.settings_loading import load_settings, merge_overrides
from babylon.core.windows import WindowState
from babylon.store import open_store
from babylon.store.policies import ensure_base
from babylon.store.windows import get_window
from benchmarks.loopback_judge import LoopbackJudge, Mind
from tests.faults.cli import babylon_train, ended, stopped
from tests.faults.processes import Worker
from tests.faults.world import FLOW, SETTINGS, WINDOW, World, play, whole_only

TOLD = re.compile(
    r"^error: (the database at|the connection to the database|window \S+: \S+ could not renew) ",
    re.MULTILINE,
)


@pytest.mark.parametrize(
    ("limit", "names"), [(2_000, "artifacts/.2025"), (60_000, "checkpoints/.2025")]
)
async def test_a_full_disk_is_named(limit: int, names: str, world: World, tmp_path: Path) -> None:
    async with world.place(tmp_path / "home") as place:
        code, said = await place.run(limits={"RLIMIT_FSIZE": limit})
        assert code == 1, said
        assert (
            f"cannot write {place.settings.home.root}/{names}" in said and "free disk space" in said
        )
        failed = await place.outcome()
        assert [row["state"] for row in failed["window"]] == ["failed"]
        assert not failed["trained"] and len(failed["policies"]) == 2
        code, said = await place.run()
        assert code == 0, said


@pytest.mark.parametrize(("directory", "size"), [("artifacts", "8k"), ("checkpoints", "64k")])
async def test_a_full_disk_is_freed(
    directory: str, size: str, world: World, tmp_path: Path
) -> None:
    async with world.place(tmp_path / "home") as place:
        with tmpfs(place.settings.home.root / directory, size) as path:
            code, said = await place.run()
            assert code == 1 and f"cannot write {path}/" in said, said
            assert "No space left on device" in said and "free disk space" in said
            failed = await place.outcome()
            assert [row["state"] for row in failed["window"]] == ["failed"]
            assert not failed["trained"]
            assert not list(path.rglob(".*")), "what was begun is still in the way"
            subprocess.run(["mount", "-o", "remount,size=64m", path], check=True)
            code, said = await place.run()
            assert code == 0, said


@contextmanager
def tmpfs(path: Path, size: str) -> Iterator[Path]:
    path.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


class Proxy:
    """Between a worker and Postgres: passes everything on until ``cut``, and again after it."""

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    @property
    def url(self) -> str:
        port = self._server.sockets[0].getsockname()[1]
        return self._url._replace(
            netloc=self._url.netloc.replace(f":{self._url.port}", f":{port}")
        ).geturl()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._url.hostname, self._url.port)
        self._writers += [writer, back]
        await asyncio.gather(_pass_on(reader, back), _pass_on(there, writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:  # cut
        pass
    finally:
        writer.close()


@whole_only
async def test_a_broken_connection_in_collect_is_repaired(world: World, tmp_path: Path) -> None:
    async with world.place(tmp_path / "home", windows={"lease_s": 60.0}) as place:
        await place.rule_out()
        assert place.settings.database.url is not None
        async with (
            Proxy(place.settings.database.url.get_secret_value()) as proxy,
            babylon_train(
                place.settings.replace(database={"url": SecretStr(proxy.url)}),
                "collect.reading=stop",
            ) as process,
        ):
            await stopped(process)
            proxy.cut()
            process.send_signal(signal.SIGCONT)
            code, said = await ended(process)
        assert code == 0, said
        outcome = await place.outcome()
    assert [row["state"] for row in outcome["window"]] == [WindowState.REJECTED]
    assert len(outcome["trained"]) == 7


async def test_a_killed_database_ends_the_run_in_one_line(world: World, tmp_path: Path) -> None:
    async with LoopbackJudge(Mind(scale=(-10.0, 10.0))) as judge:
        own = {"database": {"url": None}, "home": tmp_path, "judge": {"base_url": judge.base_url}}
        settings = load_settings(**merge_overrides(SETTINGS, own))
        async with open_store(settings) as store:
            await ensure_base(store, uri=str(world.base), base_model="tiny")
            await play(store, world.base)
        with Worker(settings, FLOW, WINDOW.id, failpoint="collect.reading=stop") as worker:
            await worker.stopped()
            pid = int((tmp_path / "postgres/data/postmaster.pid").read_text().split()[0])
            sessions = psutil.Process(pid).children()
            os.kill(pid, signal.SIGKILL)
            psutil.wait_procs(sessions, timeout=10)  # a session may outlive its postmaster a little
            worker.go_on()
            assert await worker.ended() == 1, worker.said
            assert len(TOLD.findall(worker.said)) == 1, worker.said
        await asyncio.sleep(2 * settings.windows.lease_s)
        with Worker(settings, FLOW, WINDOW.id) as worker:
            assert await worker.ended() == 0, worker.said
        async with open_store(settings) as store:
            row = await get_window(store, WINDOW.id)
            assert row is not None and row.state == WindowState.DEPLOYED and row.epoch == 2
            assert await store.pool.fetchval("SELECT count(*) FROM babylon.trained") == 7
