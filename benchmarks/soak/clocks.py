"""Clocks that go wrong: the gateway and the workers' machine are minutes off, and jump.

Each skewed process preloads ``skewed_clock.c``, which moves its time of day by the offset in a
file. A machine's monotonic clock never jumps, and it is left alone.
"""

import asyncio
import os
import random
import shutil
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

SKEWED = {"gateway": "gateway_process", "worker-cpu": "--pool cpu"}  # words of a command line
MOST_S = 90.0
_SOURCE = Path(__file__).with_name("skewed_clock.c")
# Every Python process of the soak runs this first. A process of SKEWED starts itself anew, with the
# same pid and the library; its children inherit that.
_SITE = """
import os, sys
_line = " ".join(sys.orig_argv)
if "SOAK_CLOCK" not in os.environ:
    for _name, _words in {skewed!r}.items():
        if _words in _line:
            os.environ.update(LD_PRELOAD={library!r}, SOAK_CLOCK=os.path.join({directory!r}, _name))
            os.execv(sys.executable, sys.orig_argv)
"""


class Clocks:
    """The skews of a soak. ``offsets`` has the seconds by which each service is off now."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory, self._random = directory, random.Random(seed)
        self.offsets = dict.fromkeys(SKEWED, 0.0)
        self.installed = False
        self.jumps = 0

    def install(self) -> bool:
        """Skew the processes that start from now on. Return False without a C compiler."""
        compiler = shutil.which("cc")
        if compiler is None:
            return False
        self._directory.mkdir(parents=True, exist_ok=True)
        library = self._directory / "skewed_clock.so"
        built = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
        subprocess.run(built, check=True)
        for name in SKEWED:
            self._set(name, 0.0)
        about = {"skewed": SKEWED, "library": str(library), "directory": str(self._directory)}
        (self._directory / "sitecustomize.py").write_text(_SITE.format(**about))
        others = os.environ.get("PYTHONPATH")
        paths = [str(self._directory), *([others] if others else [])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        self.installed = True
        return True

    async def skew_for_ever(self, struck: Callable[[str, float], None]) -> None:
        """Move a clock every 20 to 40 seconds, sometimes back to the right time."""
        try:
            while True:
                await asyncio.sleep(self._random.uniform(20, 40))
                name = self._random.choice(list(SKEWED))
                wrong = self._random.random() < 0.7
                self._set(name, self._random.uniform(-MOST_S, MOST_S) if wrong else 0.0)
                self.jumps += 1
                struck(f"clock of {name}", time.monotonic())
        finally:
            for name in SKEWED:
                self._set(name, 0.0)

    def _set(self, name: str, offset_s: float) -> None:
        # In place, because the processes have the file mapped.
        file = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT)
        os.pwrite(file, struct.pack("=q", int(offset_s * 1e9)), 0)
        os.close(file)
        self.offsets[name] = offset_s
