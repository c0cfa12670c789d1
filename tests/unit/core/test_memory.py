"""Free memory of a process. Each test has its own, because the allocator's settings stay."""

import platform
import subprocess
import sys

import pytest

# What is kept between the cycles prevents the heap from shrinking at its end.
GARBAGE = """
import gc
import psutil
from babylon.core.memory import release_memory

gc.disable()
kept = []
for _ in range(1000):
    cycle = [b"x" * 64_000]
    cycle.append(cycle)
    kept.append(b"x" * 6_000)
del cycle
process = psutil.Process()
before = process.memory_info().rss
release_memory()
print((before - process.memory_info().rss) // 1_000_000)
"""
# Threads that allocate at the same time get an arena each, unless there is but one.
ARENAS = """
import ctypes
import threading
from babylon.core.memory import use_one_arena

use_one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
together = threading.Barrier(8)

def allocate():
    together.wait()
    for _ in range(1000):
        libc.malloc(1000)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for one in threads:
    one.start()
for one in threads:
    one.join()
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""
# A second block has the pages of the first. The third is allocated after the end.
KEPT = """
import resource
import psutil
from babylon.core.memory import free_memory_is_kept

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(b"x") * 200_000_000
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def megabytes():
    return psutil.Process().memory_info().rss // 1_000_000

first = megabytes()
with free_memory_is_kept():
    counts = [faults(), faults()]
    within = megabytes()
print(*counts, faults(), within - first, megabytes() - first)
"""


def test_the_memory_behind_cycles_goes_back_to_the_system() -> None:
    command = [sys.executable, "-c", GARBAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) > 50


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator has no arenas")
def test_threads_share_one_arena() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ARENAS], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.count("<heap nr=") == 1


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_free_memory_is_kept_for_what_is_allocated_next_and_returned_at_the_end() -> None:
    command = [sys.executable, "-c", KEPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    first, second, after, within, at_the_end = map(int, done.stdout.split())
    assert 10 * second < min(first, after)
    assert at_the_end < 100 < within
