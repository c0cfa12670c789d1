"""One rank of an update: ``python -m babylon.training.processes.rank JOB_DIRECTORY``."""

import os
import sys
import threading
import time
from pathlib import Path

import psutil

from babylon.core.objects import publish
from babylon.training.backends.own_trainer import run_job
from babylon.training.processes.failures import OWNER, write_failure
from babylon.training.processes.job import JobDirectory, UpdateJob
from babylon.training.processes.nodes import bring_files, in_home
from babylon.training.processes.torch_ranks import TorchRanks, joined_ranks

_WATCH_S = 1.0


def main() -> None:
    """Run this rank's part of the job. The first rank stores the result."""
    directory = JobDirectory(Path(sys.argv[1]))
    threading.Thread(target=_end_with_owner, daemon=True).start()
    with joined_ranks() as ranks:
        first = ranks.rank == 0
        try:
            job = _job(directory, ranks)
            update = run_job(job, directory.write_steps if first else None, ranks)
            if first:
                directory.write_result(update)
            ranks.wait()  # until the first rank has saved the checkpoint
        except Exception as error:
            write_failure(directory.path, ranks.rank, error, time.time())
            raise


def _job(directory: JobDirectory, ranks: TorchRanks) -> UpdateJob:
    """The job, which only the first machine has. The others get files that they lack."""
    home = directory.read_home()
    job: UpdateJob = ranks.from_first(directory.read_job() if ranks.rank == 0 else None)
    if ranks.several_machines and ranks.rank == 0 and job.home and job.progress_directory:
        publish(job.home, job.progress_directory)  # an earlier claim's may have another name
    ranks.wait()
    if home:
        job = in_home(job, home)
        if ranks.first_here:
            bring_files(job)
    ranks.wait()
    return job


def _end_with_owner() -> None:
    """End this process when the launcher or the process that waits for it is gone."""
    launcher, owner = os.getppid(), int(os.environ[OWNER])
    while os.getppid() == launcher and psutil.pid_exists(owner):
        time.sleep(_WATCH_S)
    os._exit(1)  # the main thread may wait for ranks that are gone, too


if __name__ == "__main__":
    main()
