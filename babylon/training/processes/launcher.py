"""torchrun's engine on one machine: ``launcher JOB_DIRECTORY PROCESSES NODES MEETING NUMBER``."""

import sys
import uuid
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from babylon.core.errors import TrainingError
from babylon.training.processes.failures import write_failure

_WATCH_S = 0.2
MEET_S = 900  # within which the machines of an update must start


def main() -> int:
    """Start the ranks and wait for them. Store the signal that killed one, if any did."""
    path, processes, nodes, meeting, number = sys.argv[1:]
    alone = int(nodes) == 1
    config = LaunchConfig(
        min_nodes=int(nodes),
        max_nodes=int(nodes),
        nproc_per_node=int(processes),
        run_id=uuid.uuid4().hex if alone else "babylon",
        # static: the machine with the job gets the first rank
        rdzv_backend="c10d" if alone else "static",
        rdzv_endpoint="localhost:0" if alone else meeting,  # 0: as `torchrun --standalone`
        rdzv_configs={} if alone else {"rank": int(number), "timeout": MEET_S},
        local_addr="127.0.0.1" if alone else None,
        max_restarts=0,  # the window's next attempt resumes, on any number of processes
        monitor_interval=_WATCH_S,
    )
    try:
        elastic_launch(config, sys.executable)("-P", "-m", "babylon.training.processes.rank", path)
    except ChildFailedError as error:
        ranks = int(processes) * int(nodes)
        for rank, failure in error.failures.items():
            if failure.exitcode < 0 and failure.signal_name() != "SIGTERM":  # that is torchrun's
                reason = TrainingError(
                    f"rank {rank} of {ranks} was killed by {failure.signal_name()}, so the"
                    " update ended; it resumes when the window is trained again. The system kills"
                    " processes when memory runs out: lower TRAIN_PROCESSES or MAX_TOKENS"
                )
                write_failure(Path(path), rank, reason, 0.0)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
