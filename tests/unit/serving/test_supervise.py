import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from babylon.serving.supervise import Service, supervised

CHILD = "import asyncio, babylon.supervise as s; asyncio.run(s.exit_with_supervisor())"
SUPERVISOR = f"""
import asyncio, sys
from pathlib import Path
from babylon.supervise import Service, supervised

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


async def test_supervised_process_ends_with_its_supervisor(tmp_path: Path) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, tmp_path / "log"], stdout=subprocess.PIPE, text=True
    )
    with supervisor:
        assert supervisor.stdout is not None
        child = psutil.Process(int(supervisor.stdout.readline()))
        supervisor.kill()
    async with asyncio.timeout(20):
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.02)
