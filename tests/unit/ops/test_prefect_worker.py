"""The memory of a worker: cycles that Python's collector is slow to find go back to the system."""

import subprocess
import sys

GARBAGE = """
import gc
import psutil
from babylon.ops.prefect_worker import release_memory

gc.disable()
kept = []
for _ in range(1000):  # the bytes that are kept prevent the heap from shrinking at its end
    cycle = [b"x" * 64_000]
    cycle.append(cycle)
    kept.append(b"x" * 6_000)
del cycle
process = psutil.Process()
before = process.memory_info().rss
release_memory()
print((before - process.memory_info().rss) // 1_000_000)
"""


def test_the_memory_behind_cycles_goes_back_to_the_system() -> None:
    command = [sys.executable, "-c", GARBAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) > 50
