"""Ends what an interrupted test run leaves running: Postgres, Prefect servers, engines.

Services of tests are sessions of their own, as in operation, so neither Ctrl-C nor the end of
pytest reaches them; a run that is killed tidies nothing up. Each process of a run therefore has the
run's mark in its environment, and a guard outside the run ends all of them when pytest has ended.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import psutil

MARK = "BABYLON_TEST_RUN"
GRACE_S = 10.0


def run_directory(parent: Path) -> Path:
    """The directory of the server that all workers of this run share."""
    return parent / f"babylon-tests-{os.environ[MARK]}"


def start_guard(directories: list[Path]) -> None:
    """Mark this process and its children, and start their guard.

    ``directories``: in which the run may leave its ``run_directory``.
    """
    os.environ[MARK] = uuid4().hex
    places = [str(run_directory(parent)) for parent in directories]
    subprocess.Popen(
        [sys.executable, "-P", __file__, str(os.getpid()), os.environ[MARK], *places],
        env={name: value for name, value in os.environ.items() if name != MARK},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ).returncode = 0  # it outlives this process


def marked(mark: str) -> Iterator[psutil.Process]:
    """Yield the processes of a run."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it ended, or belongs to somebody else
            if process.environ().get(MARK) == mark:
                yield process


def _guard(pid: int, mark: str, places: list[str]) -> None:
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait()
    for end in (psutil.Process.terminate, psutil.Process.kill):
        left = list(marked(mark))
        for process in left:
            with suppress(psutil.NoSuchProcess):
                end(process)
        psutil.wait_procs(left, timeout=GRACE_S)
    for place in places:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
