"""Run a ``prefect`` command in a process whose memory stays small for months:
``python -m babylon.cli.prefect_process worker start …``.

A worker makes clients for each run, and they end in reference cycles of few objects with megabytes
behind them: a worker grew by a third of a megabyte a run.
"""

import threading
import time

from prefect.cli import app

from babylon.core.memory import MEMORY_CHECK_S, release_memory, use_one_arena


def _keep_memory_small() -> None:
    while True:
        time.sleep(MEMORY_CHECK_S)
        release_memory()


if __name__ == "__main__":
    use_one_arena()
    threading.Thread(target=_keep_memory_small, daemon=True).start()
    app()
