"""Detached processes with a record each: started once, recognised later, stopped for certain."""

import fcntl
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from babylon.core.errors import ServingError
from babylon.core.home import make_directory

GRACE_S = 20.0


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Start time and pid together name one process for ever; a pid alone is used again."""

    name: str
    pid: int
    created: float
    port: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The processes that one home has started."""

    home: Path

    @property
    def directory(self) -> Path:
        return self.home / "run"

    def log(self, name: str) -> Path:
        return self.home / "logs" / f"{name}.log"

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """One ``up`` or ``down`` of a home at a time; the kernel frees a dead one's lock."""
        make_directory(self.directory)
        with (self.directory / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ServingError(
                    f"another `babylon up` or `down` of {self.home} is at work: wait for it"
                ) from error
            yield

    def running(self, name: str) -> Record | None:
        """The record of a live process; one that died is forgotten."""
        path = self.directory / f"{name}.json"
        if not path.exists():
            return None
        record = msgspec.json.decode(path.read_bytes(), type=Record)
        if _process(record) is None:
            path.unlink(missing_ok=True)
            return None
        return record

    def started(self, pid: int) -> bool:
        """Is it one of the recorded processes, or a descendant of one?"""
        family = {pid}
        with suppress(psutil.NoSuchProcess):
            family |= {parent.pid for parent in psutil.Process(pid).parents()}
        records = [self.running(path.stem) for path in self.directory.glob("*.json")]
        return any(record.pid in family for record in records if record)

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        port: int | None = None,
        directory: Path | None = None,
    ) -> Record:
        """Start in a session of its own, output appended to the log, and write the record."""
        log = self.log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            child = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=directory,
                start_new_session=True,
            )
        created = psutil.Process(child.pid).create_time()
        child.returncode = 0  # it outlives this process: Popen need not watch it
        record = Record(name=name, pid=child.pid, created=created, port=port)
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / f"{name}.json").write_bytes(msgspec.json.encode(record))
        return record

    def stop(self, name: str, grace_s: float = GRACE_S) -> bool:
        """SIGTERM, and SIGKILL to it and its descendants that are left after the grace.

        Returns whether it ran.
        """
        record = self.running(name)
        process = _process(record) if record else None
        if process is None:
            return False
        family = [process, *process.children(recursive=True)]
        with suppress(psutil.NoSuchProcess):
            process.terminate()
        _, left = psutil.wait_procs(family, timeout=grace_s)
        for survivor in left:
            with suppress(psutil.NoSuchProcess):
                survivor.kill()
        psutil.wait_procs(left, timeout=5)
        (self.directory / f"{name}.json").unlink(missing_ok=True)
        return True

    def log_tail(self, name: str, lines: int = 12) -> str:
        path = self.log(name)
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def _process(record: Record) -> psutil.Process | None:
    try:
        process = psutil.Process(record.pid)
        same = abs(process.create_time() - record.created) < 1
        dead = process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if same and not dead else None
