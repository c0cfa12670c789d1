"""Processes of this machine: children kept alive by their parent, and detached ones on record.

Both start in a session of their own, so that Ctrl-C reaches the parent alone, and append their
output to a log. ``supervised`` starts a child again when it dies, or adopts a process that a killed
supervisor left. ``keep_logs_small`` bounds the logs of a home. ``Processes`` keeps a record of each
process that outlives the command that started it.
"""

import asyncio
import fcntl
import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from babylon.core.errors import BabylonError, ServingError
from babylon.core.home import make_directory, make_home

logger = logging.getLogger(__name__)

SUPERVISOR = "BABYLON_SUPERVISOR"  # the parent's pid, in the environment of a supervised process
GRACE_S = 20.0
_SUPERVISED_GRACE_S = 15.0
_POLL_S, _ORPHAN_POLL_S = 0.1, 0.25
_ORPHAN_AGAIN_S = 10.0  # calls in flight have this long
_SECOND_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
LOG_BYTES = 16 * 2**20
_LOG_CHECK_S = 60.0
_STABLE_S = 60.0  # a process that lived this long starts again at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A program to run.

    ``environment`` is added to this process's own. ``descriptors``: open files that it inherits.
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    descriptors: Sequence[int] = ()

    def start(self, **environment: str) -> "subprocess.Popen[bytes]":
        make_directory(self.log.parent)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=self.descriptors,
            )

    def log_tail(self, lines: int = 12) -> str:
        """The last lines of the log, none if somebody removed it."""
        with suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").strip().splitlines()[-lines:])
        return ""


OnStart = Callable[[str, int], None]


class _Adopted:
    """A process of a supervisor that died, with the methods of ``Popen`` that are used here."""

    def __init__(self, process: psutil.Process) -> None:
        self._process, self.pid = process, process.pid
        self.terminate, self.kill = process.terminate, process.kill

    def poll(self) -> int | None:
        """Return 255 after its end, because only a parent learns the exit code."""
        return None if lives(self._process) else 255

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end. One that its new parent does not reap counts as ended."""
        deadline = time.monotonic() + timeout if timeout is not None else math.inf
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            time.sleep(_POLL_S)


class Supervised:
    """A running service. ``exit_code`` is the code of its last death, ``None`` if it never died."""

    def __init__(
        self,
        service: Service,
        on_start: OnStart | None = None,
        adopt: "ProcessRecord | None" = None,
        **environment: str,
    ) -> None:
        self.service = service
        self.exit_code: int | None = None
        self._on_start, self._environment = on_start, environment
        found = _process(adopt) if adopt else None
        self._process: subprocess.Popen[bytes] | _Adopted
        self._process = _Adopted(found) if found else self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def failure(self) -> str | None:
        """The exit code, the last line of the log and its path; ``None`` if it never died."""
        if self.exit_code is None:
            return None
        return (
            f"the {self.service.name} ended with code {self.exit_code}:"
            f" {self.service.log_tail(1) or 'no output'}; see {self.service.log}"
        )

    async def keep_alive(self) -> None:
        pause = 0.0  # the first death costs no wait, and a service that dies at once must not spin
        while True:
            started = time.monotonic()
            while (code := self._process.poll()) is None:
                await asyncio.sleep(_POLL_S)
            self.exit_code = code
            pause = 0.0 if time.monotonic() - started > _STABLE_S else pause
            logger.warning("%s; starts again in %.1f s", self.failure(), pause)
            await asyncio.sleep(pause)
            pause = min(max(2 * pause, _SECOND_PAUSE_S), _LONGEST_PAUSE_S)
            try:
                self._process = self._start()
            # Too many processes, or no directory for its log: the next pause may help.
            except (OSError, BabylonError) as error:
                logger.warning("the %s does not start: %s", self.service.name, error)

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if the process does not end in time."""
        with suppress(psutil.NoSuchProcess):  # an adopted one is reaped by another process
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, _SUPERVISED_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        process = self.service.start(**self._environment, **{SUPERVISOR: str(os.getpid())})
        if self._on_start:
            try:
                self._on_start(self.service.name, process.pid)
            except BaseException:  # on a full disk: a process that nobody knows must not stay
                process.kill()
                process.wait()
                raise
        return process


@asynccontextmanager
async def supervised(
    service: Service,
    on_start: OnStart | None = None,
    adopt: "ProcessRecord | None" = None,
    **environment: str,
) -> AsyncIterator[Supervised]:
    """Run a service while the block runs, and start it again whenever it dies.

    ``on_start`` is called with name and pid whenever a process of it starts. ``adopt``: the process
    that runs the service already.
    """
    running = Supervised(service, on_start, adopt, **environment)
    try:
        async with in_background(running.keep_alive()):
            yield running
    finally:
        await running.stop()


@asynccontextmanager
async def all_supervised(
    services: Sequence[Service], **environment: str
) -> AsyncIterator[tuple[Supervised, ...]]:
    """Run services as ``supervised`` does, and stop all of them together."""
    running: list[Supervised] = []
    try:
        async with AsyncExitStack() as stack:
            for service in services:
                running.append(Supervised(service, None, None, **environment))
                await stack.enter_async_context(in_background(running[-1].keep_alive()))
            yield tuple(running)
    finally:
        await asyncio.gather(*(one.stop() for one in running))


@asynccontextmanager
async def in_background(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run ``work`` while the block runs, and cancel it at the end. A failure is logged at once."""
    task = asyncio.create_task(work)
    task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()):
        logger.error("work in the background has ended", exc_info=error)


async def keep_logs_small(directory: Path) -> None:
    """Rotate the logs of a directory once a minute, for ever."""
    while True:
        with suppress(OSError):  # a log that goes meanwhile must not end the rotation
            await asyncio.to_thread(rotate_logs, directory)
        await asyncio.sleep(_LOG_CHECK_S)


def rotate_logs(directory: Path, most: int = LOG_BYTES) -> None:
    """Move the last ``most`` bytes of each larger log to ``<name>.log.1``, and empty the log.

    The log is emptied in place: its writers hold it open, and none of them can reopen a log.
    """
    for log in directory.glob("*.log"):
        if log.stat().st_size <= most:
            continue
        # On a full disk the old lines are lost. The log must shrink all the same.
        with suppress(OSError), log.open("rb") as old:
            old.seek(-most, os.SEEK_END)
            log.with_suffix(".log.1").write_bytes(old.read(most))
        os.truncate(log, 0)


async def exit_with_supervisor() -> None:
    """End this process when its supervisor is gone. Return at once in one without a supervisor.

    SIGTERM is sent again, because a server that has not begun to serve may miss the first.
    """
    supervisor = os.environ.get(SUPERVISOR)
    if supervisor is None:
        return
    while os.getppid() == int(supervisor):
        await asyncio.sleep(_ORPHAN_POLL_S)
    while True:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(_ORPHAN_AGAIN_S)


_START = 19  # of the fields of /proc/PID/stat behind the command: ``starttime``


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Pid and start identify one process for ever. The system uses a pid again.

    ``started``: the boot and the ticks since, which no step of the wall clock changes; empty where
    the system does not tell them, as outside Linux. ``created`` is by the wall clock.
    """

    name: str
    pid: int
    created: float
    port: int | None
    started: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The detached processes of one home."""

    home: Path

    @property
    def directory(self) -> Path:
        return self.home / "run"

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the home's lock. The kernel frees it when the holder dies.

        Raises:
            ServingError: another process holds it.
        """
        make_home(self.home)
        make_directory(self.directory)
        with (self.directory / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ServingError(
                    f"another `babylon up` or `down` of {self.home} is running: wait for it"
                ) from error
            yield

    def running(self, name: str) -> ProcessRecord | None:
        """The record of a process that lives here.

        The record of another one stays: it may live in another container with the same home. One
        that a loss of power emptied is of no process that lives.
        """
        try:
            record = msgspec.json.decode(self._path(name).read_bytes(), type=ProcessRecord)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        return record if _process(record) else None

    def started(self, pid: int) -> bool:
        """Return true if a process is on record or descends from one that is."""
        family = {pid}
        with suppress(psutil.NoSuchProcess):
            family |= {parent.pid for parent in psutil.Process(pid).parents()}
        records = [self.running(path.stem) for path in self.directory.glob("*.json")]
        return any(record.pid in family for record in records if record)

    def start(self, service: Service, port: int | None = None, **environment: str) -> ProcessRecord:
        """Start a service that outlives this process, and write its record."""
        child = service.start(**environment)
        child.returncode = 0  # it outlives this process: Popen need not watch it
        return self.record(service.name, child.pid, port)

    def record(self, name: str, pid: int, port: int | None = None) -> ProcessRecord:
        """Write the record of a process that runs."""
        created = psutil.Process(pid).create_time()
        record = ProcessRecord(
            name=name, pid=pid, created=created, port=port, started=_started(pid)
        )
        make_home(self.home)
        make_directory(self.directory)
        part = self._path(name).with_suffix(f".{os.getpid()}")
        part.write_bytes(msgspec.json.encode(record))
        part.replace(self._path(name))  # readers never see a partial record
        return record

    def recorder(self, port: int | None = None) -> OnStart:
        """Return a function that records each process of a supervised service."""

        def record(name: str, pid: int) -> None:
            self.record(name, pid, port)

        return record

    def stop(self, name: str, grace_s: float = GRACE_S) -> bool:
        """Send SIGTERM to a process, wait for it and its descendants, and kill what is left.

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
        self._path(name).unlink(missing_ok=True)
        return True

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.json"


def _process(record: ProcessRecord) -> psutil.Process | None:
    try:
        process = psutil.Process(record.pid)
        same = abs(process.create_time() - record.created) < 1
        if record.started:
            same = _started(record.pid) == record.started
    except psutil.NoSuchProcess:
        return None
    return process if same and lives(process) else None


def _started(pid: int) -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        about = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return f"{boot} {about.rpartition(')')[2].split()[_START]}"


def lives(process: psutil.Process) -> bool:
    """Return False for a process that ended, also one that nobody has waited for."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
