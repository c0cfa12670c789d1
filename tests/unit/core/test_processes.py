"""Supervised and detached processes, with real ones."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from babylon.core import processes
from babylon.core.errors import ServingError
from babylon.core.processes import (
    LOG_BYTES,
    Processes,
    ProcessRecord,
    Service,
    in_background,
    keep_logs_small,
    lives,
    rotate_logs,
    supervised,
)

CHILD = "import asyncio, babylon.core.processes as s; asyncio.run(s.exit_with_supervisor())"
SUPERVISOR = f"""
import asyncio, sys
from pathlib import Path
from babylon.core.processes import Service, supervised

async def main():
    child = Service(name="child", command=[sys.executable, "-c", {CHILD!r}], log=Path(sys.argv[1]))
    async with supervised(child) as running:
        print(running.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_service_that_dies_is_started_again_and_stopped_at_the_end(tmp_path: Path) -> None:
    script = "import time; print('hello', flush=True); time.sleep(60)"
    service = Service(
        name="sleeper", command=[sys.executable, "-c", script], log=tmp_path / "logs" / "sleeper"
    )
    async with asyncio.timeout(20), supervised(service) as running:
        first = running.pid
        assert running.failure() is None
        while not service.log.read_text():
            await asyncio.sleep(0.02)
        os.kill(first, signal.SIGKILL)
        while running.pid == first:
            await asyncio.sleep(0.02)
        failure = running.failure()
        assert failure is not None
        assert failure.startswith("the sleeper ended with code -9: hello; see ")
    assert not psutil.pid_exists(running.pid)


async def test_a_service_whose_log_is_gone_is_started_again(tmp_path: Path) -> None:
    service = Service(name="sleeper", command=["sleep", "60"], log=tmp_path / "sleeper.log")
    async with asyncio.timeout(20), supervised(service) as running:
        first = running.pid
        service.log.unlink()
        os.kill(first, signal.SIGKILL)
        while running.pid == first:
            await asyncio.sleep(0.02)


async def test_work_in_the_background_that_fails_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise ValueError("broken")

    async with in_background(work()):
        await asyncio.sleep(0.01)
        assert "broken" in caplog.text


async def test_a_restart_that_fails_is_tried_again_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("babylon.core.processes._SECOND_PAUSE_S", 0.05)
    pids: list[int] = []

    def record(_: str, pid: int) -> None:
        pids.append(pid)
        if len(pids) == 2:
            raise OSError("No space left on device")

    service = Service(name="sleeper", command=["sleep", "60"], log=tmp_path / "sleeper.log")
    async with asyncio.timeout(20), supervised(service, record) as running:
        os.kill(running.pid, signal.SIGKILL)
        while len(pids) < 3:
            await asyncio.sleep(0.02)
        assert not psutil.pid_exists(pids[1])
    assert not psutil.pid_exists(pids[2])


async def test_a_service_starts_again_once_its_log_has_a_directory_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`logs/` may be deleted, and a full disk has no room for a new one."""
    monkeypatch.setattr("babylon.core.processes._SECOND_PAUSE_S", 0.05)
    logs, pids = tmp_path / "logs", list[int]()
    service = Service(name="sleeper", command=["sleep", "60"], log=logs / "sleeper.log")
    known = supervised(service, lambda _, pid: pids.append(pid))
    async with asyncio.timeout(20), known as running:
        (logs / "sleeper.log").unlink()
        logs.rmdir()
        logs.touch()  # no directory can be made here
        os.kill(running.pid, signal.SIGKILL)
        while "the sleeper does not start" not in caplog.text:
            await asyncio.sleep(0.02)
        logs.unlink()
        while len(pids) < 2:
            await asyncio.sleep(0.02)


async def test_a_process_that_was_left_is_adopted_and_started_again_when_it_dies(
    tmp_path: Path,
) -> None:
    service = Service(name="sleeper", command=["sleep", "60"], log=tmp_path / "sleeper.log")
    processes = Processes(home=tmp_path)
    left = processes.start(service)
    async with asyncio.timeout(20), supervised(service, processes.recorder(), left) as running:
        assert running.pid == left.pid
        os.kill(left.pid, signal.SIGKILL)
        while running.pid == left.pid:
            await asyncio.sleep(0.02)
        assert running.exit_code == 255
        assert (record := processes.running("sleeper")) and record.pid == running.pid
    async with asyncio.timeout(20), supervised(service, adopt=left) as running:
        assert running.pid != left.pid  # it is dead: another one is started
    left = processes.start(service)
    async with asyncio.timeout(20), supervised(service, adopt=left):
        pass
    assert processes.running("sleeper") is None  # an adopted one is stopped too


LOUD = "import time\nwhile True: print('x' * 999, flush=True); time.sleep(0.0001)"


async def test_the_logs_of_a_service_that_writes_for_ever_stay_bounded(tmp_path: Path) -> None:
    service = Service(name="loud", command=[sys.executable, "-c", LOUD], log=tmp_path / "loud.log")
    async with asyncio.timeout(20), supervised(service):
        for _ in range(3):
            while service.log.stat().st_size <= 50_000:
                await asyncio.sleep(0.01)
            rotate_logs(tmp_path, most=50_000)
            assert service.log.stat().st_size < 50_000  # the service goes on at its new end
            assert (tmp_path / "loud.log.1").stat().st_size == 50_000
    assert b"\0" not in service.log.read_bytes()


async def test_logs_are_rotated_while_serving_runs(tmp_path: Path) -> None:
    small, large = tmp_path / "small.log", tmp_path / "large.log"
    small.write_text("kept")
    with large.open("wb") as log:
        log.truncate(LOG_BYTES + 1)
    async with asyncio.timeout(20), in_background(keep_logs_small(tmp_path)):
        while large.stat().st_size:
            await asyncio.sleep(0.01)
    assert small.read_text() == "kept"


async def test_supervised_process_ends_with_its_supervisor(tmp_path: Path) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, tmp_path / "log"], stdout=subprocess.PIPE, text=True
    )
    with supervisor:
        assert supervisor.stdout is not None
        child = psutil.Process(int(supervisor.stdout.readline()))
        supervisor.kill()
    async with asyncio.timeout(20):
        while lives(child):
            await asyncio.sleep(0.02)


SLEEP = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)")
DEAF = (
    sys.executable,
    "-c",
    "import signal, subprocess, sys, time;"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    "print('up', flush=True); time.sleep(60)",
)


async def test_a_process_that_missed_its_supervisors_end_gets_the_signal_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gateway whose supervisor died before it served kept its port for ever."""
    heard: list[int] = []
    monkeypatch.setenv(processes.SUPERVISOR, str(os.getppid() + 1))
    monkeypatch.setattr(processes, "_ORPHAN_AGAIN_S", 0.01)
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        async with in_background(processes.exit_with_supervisor()):
            async with asyncio.timeout(10):
                while len(heard) < 3:
                    await asyncio.sleep(0.01)
    finally:
        signal.signal(signal.SIGTERM, before)


def started(processes: Processes, command: tuple[str, ...]) -> ProcessRecord:
    service = Service(name="sleeper", command=command, log=processes.home / "logs" / "sleeper.log")
    record = processes.start(service)
    deadline = time.monotonic() + 20
    while service.log_tail() != "up" and time.monotonic() < deadline:
        time.sleep(0.02)
    return record


def test_a_started_process_is_recognised_logged_and_stopped(tmp_path: Path) -> None:
    processes = Processes(home=tmp_path)
    record = started(processes, SLEEP)
    assert processes.running("sleeper") == record
    assert "up" in (tmp_path / "logs" / "sleeper.log").read_text()
    assert processes.stop("sleeper")
    assert not psutil.pid_exists(record.pid)
    assert processes.running("sleeper") is None
    assert not processes.stop("sleeper")


def test_a_process_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    processes = Processes(home=tmp_path)
    record = started(processes, DEAF)
    (child,) = psutil.Process(record.pid).children()
    processes.stop("sleeper", grace_s=0.3)
    assert not psutil.pid_exists(record.pid)
    assert not lives(child)


@pytest.mark.parametrize("seconds", [1.5, -3600])
def test_a_step_of_the_wall_clock_makes_no_process_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    processes = Processes(home=tmp_path)
    record = started(processes, DEAF)
    created = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: created(self) + seconds)
    assert processes.running("sleeper") == record and processes.started(record.pid)
    assert processes.stop("sleeper", grace_s=0.3)
    assert not psutil.pid_exists(record.pid)


@pytest.mark.parametrize("begun", ["", "another boot 17"])
def test_a_pid_that_belongs_to_another_process_by_now_is_never_touched(
    tmp_path: Path, begun: str
) -> None:
    processes = Processes(home=tmp_path)
    stranger = ProcessRecord(name="sleeper", pid=os.getpid(), created=1.0, port=None, started=begun)
    processes.directory.mkdir(parents=True)
    (processes.directory / "sleeper.json").write_bytes(msgspec.json.encode(stranger))
    assert not processes.stop("sleeper")
    assert psutil.Process(os.getpid()).is_running()


def test_two_ups_of_one_home_do_not_run_at_once(tmp_path: Path) -> None:
    processes = Processes(home=tmp_path)
    with (
        processes.exclusive(),
        pytest.raises(ServingError, match="is running: wait"),
        processes.exclusive(),
    ):
        pass


def test_the_record_of_a_process_that_is_not_here_stays(tmp_path: Path) -> None:
    """A command in another container with the same home sees none of the processes."""
    processes = Processes(home=tmp_path)
    processes.record("one", os.getpid())
    path = tmp_path / "run" / "one.json"
    path.write_text(path.read_text().replace(f":{os.getpid()},", f":{2**22 + 1},"))
    assert processes.running("one") is None and path.exists()
    assert not processes.stop("one")
