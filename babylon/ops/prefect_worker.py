"""A worker of Prefect for months: ``python -m babylon.ops.prefect_worker worker start …``.

A worker makes clients for each run, and they end in reference cycles of few objects with megabytes
behind them. The collector of Python counts objects, not bytes, and so a worker grew by a third of a
megabyte a run. The cycles are broken here once a minute, and their memory goes back.
"""

import ctypes
import gc
import threading
import time
from contextlib import suppress

from prefect.cli import app

EVERY_S = 60.0


def release_memory() -> None:
    """Break all reference cycles, and return unused memory to the system where glibc can."""
    gc.collect()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _release_for_ever() -> None:
    while True:
        time.sleep(EVERY_S)
        release_memory()


if __name__ == "__main__":
    threading.Thread(target=_release_for_ever, daemon=True).start()
    app()
