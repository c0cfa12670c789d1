"""Workers that may be killed: real processes, forked from a server that has imported everything.

Each has an environment of its own. Importing torch and Prefect takes seconds, a fork does not.
"""

import asyncio
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from itertools import count
from multiprocessing import forkserver
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from babylon.core.failpoints import VARIABLE
from babylon.core.settings import Settings

PATIENCE_S = 120.0
_PRELOADED = ("inside", "acts", "worker")
CONTEXT = multiprocessing.get_context("forkserver")
_numbers = count(1)


def start_server(home: Path) -> None:
    """Start the server that workers are forked from; ``home`` is only for its imports."""
    before = dict(os.environ)
    os.environ.update(BABYLON_HOME=str(home), OMP_NUM_THREADS="1")
    os.environ.pop("DATABASE_URL", None)
    try:
        CONTEXT.set_forkserver_preload([f"tests.faults.{name}" for name in _PRELOADED])
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


class Worker:
    """One process, which ends with what ``target`` (``module:function``) returns; ``limits`` are
    resource limits by name. ``with`` kills it at the end, should it still run."""

    def __init__(
        self,
        settings: Settings,
        target: str,
        *arguments: str,
        failpoint: str = "",
        limits: Mapping[str, int] | None = None,
    ) -> None:
        settings.home.logs.mkdir(parents=True, exist_ok=True)
        self._log = settings.home.logs / f"worker-{next(_numbers)}.log"
        environment = {**settings.environment(), VARIABLE: failpoint}
        self._process = CONTEXT.Process(
            target=_work, args=(environment, str(self._log), dict(limits or {}), target, arguments)
        )
        self._process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()

    @property
    def said(self) -> str:
        """Its stdout and stderr so far."""
        return self._log.read_text() if self._log.exists() else ""

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal that killed it."""
        return self._process.exitcode

    async def ended(self) -> int:
        """Its exit code, once it has ended; minus the signal that killed it."""
        await asyncio.to_thread(self._process.join, PATIENCE_S)
        assert self._process.exitcode is not None, f"still running: {self.said}"
        return self._process.exitcode

    async def stopped(self) -> None:
        """Return when it has halted itself."""
        deadline = time.monotonic() + PATIENCE_S
        while psutil.Process(self.pid).status() != psutil.STATUS_STOPPED:
            assert self._process.is_alive(), f"ended instead: {self.said}"
            assert time.monotonic() < deadline, f"did not stop: {self.said}"
            await asyncio.sleep(0.02)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


def _work(
    environment: dict[str, str],
    log: str,
    limits: dict[str, int],
    target: str,
    arguments: tuple[str, ...],
) -> None:
    os.environ.update(environment)
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    module, function = target.split(":")
    sys.exit(getattr(import_module(module), function)(*arguments))
