"""Detached processes, with real ones."""

import os
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from babylon.core.errors import ServingError
from babylon.ops.up.processes import Processes, Record

SLEEP = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)")
DEAF = (
    sys.executable,
    "-c",
    "import signal, subprocess, sys, time;"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    "print('up', flush=True); time.sleep(60)",
)


def started(processes: Processes, argv: tuple[str, ...]) -> Record:
    record = processes.start("sleeper", argv, environment=os.environ)
    deadline = time.monotonic() + 20
    while "up" not in processes.log("sleeper").read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    return record


def test_a_started_process_is_recognised_logged_and_stopped(tmp_path: Path) -> None:
    processes = Processes(home=tmp_path)
    record = started(processes, SLEEP)
    assert processes.running("sleeper") == record
    assert processes.log_tail("sleeper") == "up"
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
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_pid_that_belongs_to_another_process_by_now_is_never_touched(tmp_path: Path) -> None:
    processes = Processes(home=tmp_path)
    stranger = Record(name="sleeper", pid=os.getpid(), created=1.0, port=None)
    processes.directory.mkdir(parents=True)
    (processes.directory / "sleeper.json").write_bytes(msgspec.json.encode(stranger))
    assert not processes.stop("sleeper")
    assert psutil.Process(os.getpid()).is_running()


def test_two_ups_of_one_home_do_not_run_at_once(tmp_path: Path) -> None:
    processes = Processes(home=tmp_path)
    with processes.exclusive(), pytest.raises(ServingError, match="at work"), processes.exclusive():
        pass
