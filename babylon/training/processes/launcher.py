"""torchrun's engine: ``python -m babylon.training.processes.launcher JOB_DIRECTORY PROCESSES``."""

import sys
import uuid
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from babylon.core.errors import TrainingError
from babylon.training.processes.failures import write_failure

_WATCH_S = 0.2


def main() -> int:
    """Start the ranks and wait for them. Store the signal that killed one, if any did."""
    path, processes = sys.argv[1], int(sys.argv[2])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port, as `torchrun --standalone`
        local_addr="127.0.0.1",
        max_restarts=0,  # the window's next attempt resumes, on any number of processes
        monitor_interval=_WATCH_S,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "babylon.training.processes.rank", path)
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            if failure.exitcode < 0 and failure.signal_name() != "SIGTERM":  # that is torchrun's
                reason = TrainingError(
                    f"rank {rank} of {processes} was killed by {failure.signal_name()}, so the"
                    " update ended; it resumes when the window is trained again. The system kills"
                    " processes when memory runs out: lower TRAIN_PROCESSES or MAX_TOKENS"
                )
                write_failure(Path(path), rank, reason, 0.0)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
