"""Free memory of this process: given back to the system, or kept, where glibc allocates.

Elsewhere, all of this leaves the allocator as it is.
"""

import asyncio
import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MEMORY_CHECK_S = 60.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8  # of malloc.h
_MMAP_MAX = 65_536  # glibc's default
_HIGHEST_MMAP_THRESHOLD = 32 * 2**20  # that glibc chooses by itself; it trims at twice as much
_NEVER = -1  # mallopt(3)


async def keep_memory_small() -> None:
    """Call ``release_memory`` once a minute, for ever, of one arena."""
    use_one_arena()
    while True:
        await asyncio.sleep(MEMORY_CHECK_S)
        release_memory()


def release_memory() -> None:
    """Break all reference cycles, and return unused memory to the system.

    The collector of Python waits for a number of objects, whatever memory hangs on them, and glibc
    keeps the free space between those that live.
    """
    gc.collect()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def use_one_arena() -> None:
    """Let all threads that start from now on allocate from one arena, where glibc has several.

    Each arena keeps its own free space between objects that live. The embedded engine held up to
    100 MiB more with an arena for each thread.
    """
    _set(_M_ARENA_MAX, 1)


@contextmanager
def free_memory_is_kept() -> Iterator[None]:
    """Keep the memory that is freed within, for what is allocated next, and return it at the end.

    A pass of a model allocates and frees the same large blocks again and again. glibc returns each
    to the system, and every page of the next block costs a fault. On a virtual machine the faults
    took a twentieth of the trainer's time, and a fifth of a checkpoint's in the arena.
    """
    _set(_M_MMAP_MAX, 0)
    _set(_M_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        _set(_M_MMAP_MAX, _MMAP_MAX)
        _set(_M_MMAP_THRESHOLD, _HIGHEST_MMAP_THRESHOLD)
        _set(_M_TRIM_THRESHOLD, 2 * _HIGHEST_MMAP_THRESHOLD)
        release_memory()


def _set(parameter: int, value: int) -> None:
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(parameter, value)
