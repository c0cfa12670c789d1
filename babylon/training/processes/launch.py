"""Run an update on several processes of this machine by torchrun, and wait for it.

torchrun runs in a process of its own, because it takes over signals. It ends all ranks when one
of them ends badly. The update's progress stays, and the next attempt resumes from it.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch

from babylon.core.errors import TrainingError
from babylon.training.processes.failures import OWNER, first_failure
from babylon.training.processes.job import JobDirectory, UpdateJob
from babylon.training.update_result import Update

_POLL_S = 0.2
_GRACE_S = 40.0  # torchrun itself gives ranks 30 s
_LINES = 12  # of the log, in an error without a better reason


def run_in_processes(
    job: UpdateJob, processes: int, progress: Callable[[int, int], None] | None
) -> Update:
    """Run a job on ``processes`` ranks. Blocking. No rank is left when this returns.

    Raises:
        WindowNotReadyError, TrainingError, ModelError: as ``update_checkpoint``; the first rank's
            error that all others followed from, or the signal that killed a rank.
    """
    if 0 < (devices := torch.cuda.device_count()) < processes:
        raise TrainingError(
            f"TRAIN_PROCESSES is {processes}, and this worker sees {devices} GPUs, one for each"
            " process: lower it, or widen CUDA_VISIBLE_DEVICES"
        )
    with TemporaryDirectory(prefix="babylon-update-") as path:
        directory, log = JobDirectory(Path(path)), Path(path) / "log"
        directory.write_job(job)
        command = [sys.executable, "-m", "babylon.training.processes.launcher", path]
        # A session of its own: a signal for this process must not reach the ranks before torchrun.
        with log.open("wb") as output:
            launcher = subprocess.Popen(
                [*command, str(processes)],
                env=_environment(processes),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            _wait(launcher, directory, progress)
        finally:
            _end(launcher)
        if update := directory.read_result() if launcher.returncode == 0 else None:
            return update
        if error := first_failure(directory.path):
            raise error
        lines = log.read_text(errors="replace").strip().splitlines()[-_LINES:]
        raise TrainingError(f"the trainer's processes ended early: {' | '.join(lines)}")


def _wait(
    launcher: "subprocess.Popen[bytes]",
    directory: JobDirectory,
    progress: Callable[[int, int], None] | None,
) -> None:
    told = None
    while launcher.poll() is None:
        time.sleep(_POLL_S)
        steps = directory.read_steps()
        if progress is not None and steps and steps != told:
            progress(*steps)  # raises when the stage is cancelled
            told = steps


def _end(launcher: "subprocess.Popen[bytes]") -> None:
    """Stop the launcher and its ranks, if they still run."""
    if launcher.poll() is not None:
        return
    family = psutil.Process(launcher.pid).children(recursive=True)
    launcher.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        launcher.wait(_GRACE_S)
    for process in family:  # ranks have sessions of their own
        with suppress(psutil.NoSuchProcess):
            process.kill()
    launcher.kill()
    launcher.wait()


def _environment(processes: int) -> dict[str, str]:
    """This process's environment, with its cores divided among the ranks."""
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    return {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "GLOO_SOCKET_IFNAME": "lo",  # the name of a machine need not resolve
        OWNER: str(os.getpid()),
    }
