"""Child processes that are kept alive: started, started again when they die, stopped by pid."""

import asyncio
import logging
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from babylon.core.home import make_directory

logger = logging.getLogger(__name__)

SUPERVISOR = "BABYLON_SUPERVISOR"  # pid, in the environment of a supervised process
_POLL_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_STABLE_S = 60.0  # a process that lived this long starts again without a long pause
_STOP_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What to run. Output is appended to ``log``; ``environment`` is added to ours."""

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)


class Supervised:
    """A service that runs. ``exit_code`` is that of its last death, if it ever died."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.exit_code: int | None = None
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def failure(self) -> str | None:
        """If it ever died: its exit code, the last line it wrote, and where to read more."""
        if self.exit_code is None:
            return None
        lines = self.service.log.read_text(errors="replace").strip().splitlines()
        return (
            f"the {self.service.name} ended with code {self.exit_code}:"
            f" {lines[-1] if lines else 'no output'}; see {self.service.log}"
        )

    async def keep_alive(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            started = time.monotonic()
            while (code := self._process.poll()) is None:
                await asyncio.sleep(_POLL_S)
            self.exit_code = code
            pause = _FIRST_PAUSE_S if time.monotonic() - started > _STABLE_S else pause
            logger.warning("%s; starts again in %.1f s", self.failure(), pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            self._process = self._start()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL when that is not enough."""
        self._process.terminate()
        deadline = time.monotonic() + _STOP_S
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        """In a session of its own, so that Ctrl-C reaches the supervisor alone."""
        make_directory(self.service.log.parent)
        with self.service.log.open("ab") as log:
            return subprocess.Popen(
                self.service.command,
                env={**os.environ, **self.service.environment, SUPERVISOR: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


@asynccontextmanager
async def supervised(service: Service) -> AsyncIterator[Supervised]:
    """The service runs, and is started again when it dies, while the block runs."""
    running = Supervised(service)
    keeper = asyncio.create_task(running.keep_alive())
    try:
        yield running
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await running.stop()


async def exit_with_supervisor() -> None:
    """In a supervised process: end it when its supervisor is gone, however that happened."""
    supervisor = os.environ.get(SUPERVISOR)
    while supervisor is not None:
        if os.getppid() != int(supervisor):
            os.kill(os.getpid(), signal.SIGTERM)
            return
        await asyncio.sleep(1)
