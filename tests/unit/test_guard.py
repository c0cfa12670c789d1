"""The guard of a test run, which ends services that the run left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from babylon.core.processes import lives
from tests.guard import MARK, marked

ROOT = Path(__file__).parents[2]
LEAVING = """
import subprocess, sys
from pathlib import Path
from tests.guard import run_directory, start_guard
start_guard([Path(sys.argv[1])])
run_directory(Path(sys.argv[1])).mkdir()
left = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(left.pid, flush=True)
input()
left.returncode = 0
"""


@pytest.mark.parametrize("end", [None, signal.SIGTERM, signal.SIGKILL])
def test_services_and_files_of_a_run_end_with_it(
    end: signal.Signals | None, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", LEAVING, str(tmp_path)]
    about = {name: value for name, value in os.environ.items() if name != MARK}
    run = subprocess.Popen(
        command, cwd=ROOT, env=about, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with run:
        assert run.stdout is not None
        left = psutil.Process(int(run.stdout.readline()))
        while MARK not in left.environ():  # the kernel fills it in after the program began
            time.sleep(0.01)
        mark = left.environ()[MARK]
        assert left in marked(mark) and mark != os.environ[MARK]
        if end:
            run.send_signal(end)
    deadline = time.monotonic() + 60
    while lives(left):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
