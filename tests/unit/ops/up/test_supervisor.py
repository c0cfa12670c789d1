"""A starting supervisor is on record, is the only one, and ends at a signal."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import aiohttp
import psutil
import pytest

from babylon.core.errors import ServingError
from babylon.core.home import Home
from babylon.core.processes import Processes, Service
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.ops.up import supervisor
from babylon.ops.up.lifecycle import _require_detached
from babylon.ops.up.services import UpService
from babylon.ops.up.supervisor import NAME, Supervisor

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(database={"url": "postgresql://nobody@127.0.0.1:1/none"}, home=tmp_path)


def mute(home: Home) -> UpService:
    """A service that runs and never answers."""

    async def healthy(_: aiohttp.ClientSession) -> bool:
        return False

    return UpService(name="mute", command=SLEEP, log=home.logs / "mute.log", healthy=healthy)


async def test_a_signal_ends_it_while_a_service_starts(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def prepared(_: Supervisor) -> dict[str, str]:
        return {}

    monkeypatch.setattr(supervisor, "services", lambda _: [mute(settings.home)])
    monkeypatch.setattr(Supervisor, "_prepare", prepared)
    processes = Processes(home=settings.home.root)
    async with asyncio.timeout(30):
        keeping = asyncio.create_task(Supervisor(settings).run())
        while (service := processes.running("mute")) is None:
            await asyncio.sleep(0.02)
        keeper = processes.running(NAME)
        assert keeper is not None and keeper.pid == os.getpid()  # so `babylon down` finds it
        os.kill(os.getpid(), signal.SIGTERM)
        await keeping
    assert processes.running(service.name) is None


def test_one_that_somebody_else_runs_is_not_restarted(settings: Settings) -> None:
    """It would come back without systemd, a container or a terminal behind it."""
    processes = Processes(home=settings.home.root)
    log = settings.home.logs / "first.log"
    record = processes.start(Service(name=NAME, command=SLEEP, log=log))
    with pytest.raises(ServingError, match=rf"process {record.pid}, .*systemctl restart babylon"):
        _require_detached(processes)
    assert processes.stop(NAME)
    ours = Supervisor(settings).guard().environment
    record = processes.start(Service(name=NAME, command=SLEEP, log=log, environment=ours))
    while not psutil.Process(record.pid).environ():  # the kernel fills it after the exec
        time.sleep(0.01)
    _require_detached(processes)
    assert processes.stop(NAME)


async def test_a_second_one_of_the_same_home_is_refused(settings: Settings) -> None:
    processes = Processes(home=settings.home.root)
    first = Service(name=NAME, command=SLEEP, log=settings.home.logs / "first.log")
    record = processes.start(first)
    with pytest.raises(ServingError, match=f"runs already, as process {record.pid}"):
        await Supervisor(settings).run()
    assert processes.stop(NAME)
