"""Run an update on several processes by torchrun, and wait for it, or lend processes to others'.

torchrun runs in a process of its own, because it takes over signals. It ends all ranks when one
of them ends badly. The update's progress stays, and the next attempt resumes from it.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import psutil
import torch

from babylon.core.errors import ConfigError, TrainingError
from babylon.core.home import Home
from babylon.training.processes.failures import OWNER, first_failure
from babylon.training.processes.job import JobDirectory, UpdateJob
from babylon.training.processes.nodes import ALONE, Nodes
from babylon.training.update_result import Update

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_GRACE_S = 40.0  # torchrun itself gives ranks 30 s
_LINES = 12  # of the log, in an error without a better reason


def run_in_processes(
    job: UpdateJob,
    processes: int,
    progress: Callable[[int, int], None] | None,
    nodes: Nodes = ALONE,
) -> Update:
    """Run a job on ``processes`` ranks of each machine. Blocking. No rank of this one is left then.

    Raises:
        WindowNotReadyError, TrainingError, ModelError: as ``update_checkpoint``; the first rank's
            error that all others followed from, or the signal that killed a rank.
    """
    if 0 < (devices := torch.cuda.device_count()) < processes:
        raise TrainingError(
            f"TRAIN_PROCESSES is {processes}, and this worker sees {devices} GPUs, one for each"
            " process: lower it, or widen CUDA_VISIBLE_DEVICES"
        )
    with _beside(job.progress_directory) as path:
        directory, log = JobDirectory(Path(path)), Path(path) / "log"
        directory.write_job(job)
        environment = _environment(processes, nodes)
        launcher = _launched(directory, processes, nodes, log, environment)
        try:
            _wait(launcher, directory, progress)
        finally:
            _end(launcher)
        if update := directory.read_result() if launcher.returncode == 0 else None:
            return update
        if error := first_failure(directory.path):
            raise error
        raise TrainingError(f"the trainer's processes ended early: {_end_of(log)}")


def _beside(progress: Path | None) -> "TemporaryDirectory[str]":
    """A directory for a job, which holds a window's play.

    A killed process leaves it. Retention then knows by its name, as by that of the ``progress``
    directory beside it, when nobody needs it.
    """
    if progress is None:
        return TemporaryDirectory(prefix="babylon-update-")
    progress.parent.mkdir(parents=True, exist_ok=True)
    return TemporaryDirectory(dir=progress.parent, prefix=f".{progress.name}-")


def lend_processes(home: Home, processes: int, nodes: Nodes) -> NoReturn:
    """Take part in every update of the first machine, one after the other. Blocking.

    ``processes``: of this machine. 0: one for each of its GPUs, at least one.

    Raises:
        ConfigError: the settings name one machine, no home that machines share, or no address.
    """
    if nodes.count < 2 or not home.store or not 0 < nodes.number < nodes.count:
        raise ConfigError(
            f"machine {nodes.number} of TRAIN_NODES={nodes.count} with"
            f" ARTIFACT_STORE={home.store!r}: set TRAIN_NODES, TRAIN_RENDEZVOUS and ARTIFACT_STORE,"
            " and give each machine but the first a number from 1"
        )
    processes = processes or torch.cuda.device_count() or 1
    environment = _environment(processes, nodes)  # once: later the first machine may be away
    while True:
        with TemporaryDirectory(prefix="babylon-update-") as path:
            directory, log = JobDirectory(Path(path)), Path(path) / "log"
            directory.write_home(home)
            logger.info("waiting for an update at %s", nodes.meeting)
            launcher = _launched(directory, processes, nodes, log, environment)
            try:
                launcher.wait()
            finally:
                _end(launcher)
            if launcher.returncode == 0:
                logger.info("an update has ended")
            else:
                # the first machine reports it, and may begin the update again
                failure = first_failure(directory.path)
                logger.warning("an update ended early: %s", failure or _end_of(log))
                time.sleep(_POLL_S)


def _launched(
    directory: JobDirectory,
    processes: int,
    nodes: Nodes,
    log: Path,
    environment: dict[str, str],
) -> "subprocess.Popen[bytes]":
    """Start torchrun, in a session of its own.

    A signal for this process must not reach the ranks before torchrun.
    """
    launcher = (sys.executable, "-P", "-m", "babylon.training.processes.launcher")
    command = [*launcher, str(directory.path)]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, str(processes), *nodes.arguments()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _end_of(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-_LINES:])


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
    if family:  # without ranks, it waits for other machines
        launcher.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(_GRACE_S)
    for process in family:  # ranks have sessions of their own
        with suppress(psutil.NoSuchProcess):
            process.kill()
    launcher.kill()
    launcher.wait()


def _environment(processes: int, nodes: Nodes) -> dict[str, str]:
    """This process's environment, with its cores divided among the ranks."""
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    return {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or nodes.interface(),
        OWNER: str(os.getpid()),
    }
