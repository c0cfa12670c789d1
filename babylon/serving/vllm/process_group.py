"""Runs a command in its own process group, which ends with the command or with our supervisor.

vLLM's workers outlive an API server that is killed, and keep the GPU's memory. Killing the group
ends them.
"""

import asyncio
import os
import re
import signal
import sys
from contextlib import suppress

from babylon.core.processes import SUPERVISOR, exit_with_supervisor

_OWN_VARIABLES = (SUPERVISOR, "PYTHONPATH", "PYTHONHOME")
# Hundreds of variables tune vLLM, CUDA, NCCL and torch, and no list has all of them. Those with
# secrets are known by their names. ``VLLM_API_KEY`` is vLLM's own, and ``HF_TOKEN`` opens a gated
# base model.
_SECRETS = re.compile(
    r"(?:AWS|AZURE|GOOGLE|PREFECT|WANDB)_.+|PG[A-Z]+"
    r"|(?!VLLM_|HF_)(?:.+_)?(?:AUTH|CREDENTIAL|KEY|PASSWORD|SECRET|TOKEN)S?(?:_.+)?"
)
GRACE_S = 8.0  # between SIGTERM and SIGKILL; a supervisor waits longer than this


async def run(command: list[str]) -> int:
    """Run a command and return its exit code, or 128 + the number of the signal that ended it."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    environment = environment_of_others()
    child = await asyncio.create_subprocess_exec(*command, env=environment, start_new_session=True)
    supervised = asyncio.create_task(exit_with_supervisor())
    ended, stopped = asyncio.create_task(child.wait()), asyncio.create_task(stop.wait())
    await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():
        child.terminate()
        await asyncio.wait({ended}, timeout=GRACE_S)
    with suppress(ProcessLookupError):  # all processes have ended
        os.killpg(child.pid, signal.SIGKILL)
    code = await ended
    for task in (supervised, stopped):
        task.cancel()
    return code if code >= 0 else 128 - code


def environment_of_others() -> dict[str, str]:
    """Return this process's environment without the variables for its own Python, and without
    those of object stores, databases and other services."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OWN_VARIABLES and not _SECRETS.fullmatch(name)
    }


if __name__ == "__main__":
    sys.exit(asyncio.run(run(sys.argv[1:])))
