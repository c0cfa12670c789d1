"""Peak memory of a phase of this process in bytes, on Linux only."""

import contextlib
import ctypes
import gc
from pathlib import Path

_STATUS = Path("/proc/self/status")


def release() -> None:
    """Give freed memory back to the system, so that the next phase starts from its own level."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # not glibc: nothing to trim
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int | None:
    return _read("VmRSS")


def peak_bytes() -> int | None:
    """Peak since :func:`reset_peak`, or since the process started if resets are not allowed."""
    return _read("VmHWM")


def reset_peak() -> None:
    with contextlib.suppress(OSError):  # not Linux, or forbidden here
        Path("/proc/self/clear_refs").write_text("5")


def _read(key: str) -> int | None:
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None
