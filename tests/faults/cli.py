"""``babylon train`` as a user starts it, Prefect's engine and retries included."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from babylon.core.failpoints import VARIABLE
from babylon.core.settings import Settings
from tests.faults.processes import PATIENCE_S
from tests.faults.world import WINDOW

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def babylon_train(
    settings: Settings, failpoint: str = ""
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The process, which is killed at the end of the block, should it still run."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "babylon", "train", "--window", WINDOW.id, "--json"),
        cwd=ROOT,
        env={**os.environ, **settings.environment(), VARIABLE: failpoint, "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """(exit code, stdout and stderr)."""
    out, told = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode is not None
    return process.returncode, f"{out.decode()}\n{told.decode()}"


async def stopped(process: asyncio.subprocess.Process) -> None:
    """Return when it has halted itself."""
    async with asyncio.timeout(PATIENCE_S):
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            assert process.returncode is None, await ended(process)
            await asyncio.sleep(0.05)
