"""One rank of an update: ``python -m babylon.training.processes.rank JOB_DIRECTORY``."""

import os
import sys
import threading
import time
from pathlib import Path

import psutil

from babylon.training.backends.own_trainer import run_job
from babylon.training.processes.failures import OWNER, write_failure
from babylon.training.processes.job import JobDirectory
from babylon.training.processes.torch_ranks import joined_ranks

_WATCH_S = 1.0


def main() -> None:
    """Run this rank's part of the job. The first rank stores the result."""
    directory = JobDirectory(Path(sys.argv[1]))
    threading.Thread(target=_end_with_owner, daemon=True).start()
    with joined_ranks() as ranks:
        first = ranks.rank == 0
        try:
            update = run_job(directory.read_job(), directory.write_steps if first else None, ranks)
            if first:
                directory.write_result(update)
            ranks.wait()  # until the first rank has saved the checkpoint
        except Exception as error:
            write_failure(directory.path, ranks.rank, error, time.time())
            raise


def _end_with_owner() -> None:
    """End this process when the launcher or the process that waits for it is gone."""
    launcher, owner = os.getppid(), int(os.environ[OWNER])
    while os.getppid() == launcher and psutil.pid_exists(owner):
        time.sleep(_WATCH_S)
    os._exit(1)  # the main thread may wait for ranks that are gone, too


if __name__ == "__main__":
    main()
