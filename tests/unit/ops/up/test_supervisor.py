"""A starting supervisor is on record, is the only one, and ends at a signal."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import asyncpg
import psutil
import pytest

import babylon
from babylon.core.errors import ConfigError, ServingError
from babylon.core.home import Home
from babylon.core.processes import Processes, Service
from babylon.core.settings import Settings
from babylon.core.settings_loading import load_settings
from babylon.ops.prefect_env import SERVER
from babylon.ops.up import lifecycle, supervisor
from babylon.ops.up.in_force import (
    changed_settings,
    in_force_path,
    read_problem,
    write_in_force,
    written_at,
)
from babylon.ops.up.lifecycle import _require_detached
from babylon.ops.up.services import UpService
from babylon.ops.up.supervisor import _GUARD, GUARD, NAME, Supervisor
from tests.ports import free_port

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(database={"url": "postgresql://nobody@127.0.0.1:1/none"}, home=tmp_path)


def mute(home: Home) -> UpService:
    """A service that runs and never answers."""

    async def healthy(_: aiohttp.ClientSession) -> bool:
        return False

    return UpService(name="mute", command=SLEEP, log=home.logs / "mute.log", healthy=healthy)


async def test_two_services_of_one_port_are_named_before_anything_starts(tmp_path: Path) -> None:
    ports = {"engine_port": (port := free_port()), "admin_port": port}
    settings = load_settings(serving=ports, home=tmp_path / "home")
    with pytest.raises(ConfigError, match=f"ENGINE_PORT and ADMIN_PORT are the same port, {port}"):
        await lifecycle.up(settings)
    assert not (tmp_path / "home" / "postgres").exists()


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


@pytest.mark.parametrize("ran", [False, True])
async def test_a_slow_service_ends_a_first_start_and_not_one_of_services_that_ran(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, ran: bool
) -> None:
    """On a busy machine the next supervisor must not stop what it has just started."""

    async def prepared(_: Supervisor) -> dict[str, str]:
        return {}

    slow = replace(mute(settings.home), start_s=0.1)
    monkeypatch.setattr(supervisor, "services", lambda _: [slow])
    monkeypatch.setattr(Supervisor, "_prepare", prepared)
    keeper, processes = Supervisor(settings), Processes(home=settings.home.root)
    if ran:
        write_in_force(settings.home, keeper.variables)
    async with asyncio.timeout(30):
        keeping = asyncio.create_task(keeper.run())
        if ran:
            while "did not answer" not in (read_problem(settings.home) or ""):
                await asyncio.sleep(0.02)
            assert processes.running("mute") and not keeping.done()
            os.kill(os.getpid(), signal.SIGTERM)
            await keeping
        else:
            with pytest.raises(ServingError, match="did not answer"):
                await keeping
    assert processes.running("mute") is None


@pytest.mark.parametrize("left", [False, True])
async def test_what_killed_runs_left_goes_at_each_start_without_services_that_run(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    """After a reboot, and after each `systemctl restart`, the settings are those in force."""

    async def prepared(_: Supervisor) -> dict[str, str]:
        return {}

    service = mute(settings.home)
    monkeypatch.setattr(supervisor, "services", lambda _: [service])
    monkeypatch.setattr(Supervisor, "_prepare", prepared)
    monkeypatch.setattr("babylon.ops.up.services.SCRATCH_S", -60.0)
    keeper, processes = Supervisor(settings), Processes(home=settings.home.root)
    settings.home.scratch.mkdir(parents=True)
    (settings.home.scratch / "left").touch()
    write_in_force(settings.home, keeper.variables)
    if left:
        processes.start(service)
    async with asyncio.timeout(30):
        keeping = asyncio.create_task(keeper.run())
        while not (processes.running(NAME) and processes.running("mute")):
            await asyncio.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
        await keeping
    assert (settings.home.scratch / "left").exists() is left


async def test_lost_windows_are_taken_up_before_prefect_is_set_up(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that was killed again and again would otherwise never come to that."""
    taking_up = asyncio.Event()

    async def prepared(_: Supervisor) -> dict[str, str]:
        return {}

    async def take_up(*_: object) -> None:
        taking_up.set()
        await asyncio.Event().wait()

    async def away(*_: object) -> None:
        raise ServingError("Prefect does not answer")

    monkeypatch.setattr(supervisor, "services", lambda _: [])
    monkeypatch.setattr(Supervisor, "_prepare", prepared)
    monkeypatch.setattr(supervisor, "take_up_lost", take_up)
    monkeypatch.setattr(supervisor, "create_pools", away)
    async with asyncio.timeout(30):
        keeping = asyncio.create_task(Supervisor(settings).run())
        await taking_up.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await keeping


def test_services_of_another_version_are_named(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = settings.environment()
    write_in_force(settings.home, variables)
    assert changed_settings(settings.home, variables) == []
    monkeypatch.setattr(babylon, "__version__", "0.0.0", raising=False)
    assert changed_settings(settings.home, variables) == ["the version of babylon"]


@pytest.mark.parametrize("left", [b"", b"\0" * 64])
def test_records_that_a_loss_of_power_emptied_are_none(settings: Settings, left: bytes) -> None:
    """They are made without a wait for the disk, and nothing of them runs any more."""
    processes = Processes(home=settings.home.root)
    write_in_force(settings.home, settings.environment())
    processes.record(NAME, os.getpid())
    for path in (in_force_path(settings.home), processes.directory / f"{NAME}.json"):
        path.write_bytes(left)
    assert changed_settings(settings.home, settings.environment()) is None
    assert processes.running(NAME) is None and not processes.started(os.getpid())


def test_changed_variables_of_libraries_are_named(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The services inherited them when they started, and `up` must not ignore them."""
    variables = settings.environment()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "before")
    monkeypatch.delenv("PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD", raising=False)
    write_in_force(settings.home, variables)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "rotated")
    monkeypatch.setenv("PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD", "7200")
    monkeypatch.setenv("PWD", "/elsewhere")
    assert changed_settings(settings.home, variables) == [
        "AWS_SECRET_ACCESS_KEY",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD",
    ]
    assert "rotated" not in in_force_path(settings.home).read_text()


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


async def test_a_prefect_server_of_earlier_settings_is_stopped_too(settings: Settings) -> None:
    """Its supervisor was killed, and PREFECT_API_URL names another server since."""
    processes, logs = Processes(home=settings.home.root), settings.home.logs
    for name in (SERVER, "mute"):
        processes.start(Service(name=name, command=SLEEP, log=logs / f"{name}.log"))
    wanted = [mute(settings.home)]
    assert await lifecycle.down(settings.home, settings.database, wanted) == [SERVER, "mute"]
    assert processes.running(SERVER) is None and processes.running("mute") is None


async def test_status_says_where_its_output_is(settings: Settings) -> None:
    """One under systemd has no log of its own."""
    processes, log = Processes(home=settings.home.root), settings.home.logs / "first.log"

    async def detail() -> str:
        return (await lifecycle.status(settings.home, settings.database, []))[1].detail

    record = processes.start(Service(name=NAME, command=SLEEP, log=log))
    while not psutil.Process(record.pid).environ():  # the kernel fills it after the exec
        time.sleep(0.01)
    assert "journal" in await detail()
    assert processes.stop(NAME)
    assert await detail() == str(settings.home.logs / "supervisor.log")
    ours = Supervisor(settings).guard().environment
    record = processes.start(Service(name=NAME, command=SLEEP, log=log, environment=ours))
    while not psutil.Process(record.pid).environ():
        time.sleep(0.01)
    assert await detail() == str(settings.home.logs / "supervisor.log")
    assert processes.stop(NAME)


async def test_a_second_one_of_the_same_home_is_refused(settings: Settings) -> None:
    processes = Processes(home=settings.home.root)
    first = Service(name=NAME, command=SLEEP, log=settings.home.logs / "first.log")
    record = processes.start(first)
    with pytest.raises(ServingError, match=f"runs already, as process {record.pid}"):
        await Supervisor(settings).run()
    assert processes.stop(NAME)


async def test_while_prefect_is_away_agents_are_served_and_status_names_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = settings.replace(prefect={"api_url": "http://127.0.0.1:1/api"})
    calls: list[int] = []

    async def answers(_: aiohttp.ClientSession) -> bool:
        calls.append(1)
        return True

    def wanted(_: Settings) -> list[UpService]:
        log = settings.home.logs / "serving.log"
        serving = UpService(name="serving", command=SLEEP, log=log, healthy=answers)
        return [serving, replace(mute(settings.home), pool="cpu")]

    async def prepared(_: Supervisor) -> dict[str, str]:
        return {}

    monkeypatch.setattr(supervisor, "services", wanted)
    monkeypatch.setattr(supervisor, "RETRY_S", 0.05)
    monkeypatch.setattr(Supervisor, "_prepare", prepared)
    processes = Processes(home=settings.home.root)
    async with asyncio.timeout(30):
        keeping = asyncio.create_task(Supervisor(away).run())
        while written_at(settings.home) is None:
            await asyncio.sleep(0.02)
        assert "start that server, or correct PREFECT_API_URL" in str(read_problem(settings.home))
        assert processes.running("serving") and calls and processes.running("mute") is None
        os.kill(os.getpid(), signal.SIGTERM)
        await keeping


async def test_a_broken_connection_to_the_database_ends_no_service(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [asyncpg.InterfaceError("the underlying connection is closed")]

    async def step() -> None:
        if left:
            raise left.pop()

    monkeypatch.setattr(supervisor, "RETRY_S", 0)
    await Supervisor(settings)._until_done(step)
    assert not left


def test_the_guard_starts_a_killed_supervisor_again_and_no_other(tmp_path: Path) -> None:
    in_force, counted = tmp_path / "in-force", tmp_path / "starts"
    script = f"echo $$ >> {counted}; exec sleep 60"
    command = ["sh", "-c", _GUARD, str(in_force), "sh", "-c", script]

    def started(number: int) -> int:
        while not counted.exists() or len(counted.read_text().split()) < number:
            time.sleep(0.01)
        return int(counted.read_text().split()[-1])

    in_force.touch()
    with subprocess.Popen(command) as guard:
        os.kill(started(1), signal.SIGKILL)
        second = started(2)
        in_force.unlink()  # as `babylon down` does
        os.kill(second, signal.SIGKILL)
        assert guard.wait(20) == 1
    with subprocess.Popen([*command[:4], "true"]) as guard:
        assert guard.wait(20) == 0


async def made(*_: object, **__: object) -> None:
    """Make no model."""


@pytest.mark.parametrize("meanwhile", [False, True])
async def test_a_start_that_fails_is_reported_and_stops_no_supervisor_of_systemd(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, meanwhile: bool
) -> None:
    """After a reboot, as ``systemctl restart babylon && babylon up`` does: both start at once."""
    processes, log = Processes(home=settings.home.root), settings.home.logs / "first.log"

    @asynccontextmanager
    async def opened(*_: object, **__: object) -> AsyncIterator[None]:
        if meanwhile:
            other = processes.start(Service(name=NAME, command=SLEEP, log=log))
            while not psutil.Process(other.pid).environ():  # the kernel fills it after the exec
                await asyncio.sleep(0.01)
        yield

    def failing(keeper: Supervisor) -> Service:
        guard, home = ("sh", "-c", _GUARD), keeper.settings.home
        command = (*guard, str(in_force_path(home)), "sh", "-c", "echo no GPU; exit 1")
        return Service(name=GUARD, command=command, log=home.logs / "supervisor.log")

    monkeypatch.setattr(lifecycle, "open_store", opened)
    monkeypatch.setattr(lifecycle, "ensure_champion", made)
    monkeypatch.setattr(Supervisor, "guard", failing)
    keeper = Supervisor(settings)
    write_in_force(settings.home, keeper.variables)
    try:
        async with asyncio.timeout(30):
            with pytest.raises(ServingError, match="did not start"):
                await lifecycle._start(keeper, processes, [], made, lambda _: None)  # type: ignore[arg-type]
        assert (processes.running(NAME) is not None) is meanwhile
    finally:
        processes.stop(GUARD)
        processes.stop(NAME)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = Path(__file__).parents[4] / "deploy" / "systemd" / "babylon.service"
    # Otherwise systemd ends all services when the supervisor, or one of them, is killed.
    assert {"KillMode=process", "OOMPolicy=continue"} <= set(unit.read_text().splitlines())
    text = unit.read_text().replace("/opt/babylon/.venv/bin/babylon", sys.executable)
    assert sys.executable in text
    (tmp_path / unit.name).write_text(text)
    command = ["systemd-analyze", "verify", str(tmp_path / unit.name)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
