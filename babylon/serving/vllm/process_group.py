"""Runs a command whose whole family ends with it, and with whoever started us.

vLLM's workers outlive an API server that is killed, with the GPU's memory in their hands: the
command gets a process group of its own, which is killed whenever the command or our supervisor is
gone.
"""

import asyncio
import os
import signal
import sys
from contextlib import suppress

from babylon.core.processes import exit_with_supervisor
from babylon.serving.vllm.build import environment_of_others

GRACE_S = 8.0  # to end by itself; whoever stops us waits a little longer


async def run(command: list[str]) -> int:
    """Exit code of the command; one that a signal ended counts as 128 + its number."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    child = await asyncio.create_subprocess_exec(
        *command,
        env=environment_of_others(),
        start_new_session=True,
    )
    supervised = asyncio.create_task(exit_with_supervisor())
    ended, stopped = asyncio.create_task(child.wait()), asyncio.create_task(stop.wait())
    await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():
        child.terminate()
        await asyncio.wait({ended}, timeout=GRACE_S)
    with suppress(ProcessLookupError):  # nobody is left
        os.killpg(child.pid, signal.SIGKILL)
    code = await ended
    for task in (supervised, stopped):
        task.cancel()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(asyncio.run(run(sys.argv[1:])))
