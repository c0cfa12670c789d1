"""The embedded Postgres under ``home/postgres``, run by the processes that use it.

All processes of a home share one server: the first one starts it, and the last one to leave stops
it. Three file locks coordinate them. The kernel frees a lock when its holder dies.

``gate``    exclusive, while starting or stopping: one process at a time
``users``   shared, while using the server: together the holders are the reference count
``server``  exclusive, inherited by Postgres and all its children: when it is free, no process of
            this cluster is left, so a stale ``postmaster.pid`` may go and a server may start

The server listens on loopback only, on a port chosen once, and asks for a generated password.
"""

import fcntl
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import psutil

from babylon.core.errors import DatabaseError
from babylon.core.home import make_home, server_account
from babylon.core.processes import lives
from babylon.store.postgres_programs import Command, Launch, binaries, launcher

USER = "babylon"
START_S, STOP_S = 120.0, 60.0
START_ATTEMPTS = 3
_POLL_S = 0.02
_LOG_TAIL = 2000  # last characters of the server's log that are searched for the reason
_FATAL = re.compile(r".*\b(FATAL|PANIC): +")
_ERROR = re.compile(r".*?\b(FATAL|PANIC|ERROR|error): +")  # initdb writes it in lower case
_DETAIL = re.compile(r".*\b(DETAIL|HINT): +")
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "max_wal_size": "512MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_checkpoints": "off",
}
_STARTED: dict[Path, int] = {}
"""The postmasters that this process started, by data directory. Any instance reaps them."""


class EmbeddedPostgres:
    """A home's server. ``acquire`` before use, ``release`` after; both block, neither nests."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.directory = home / "postgres"
        self.data = self.directory / "data"
        self.log = home / "logs" / "postgres.log"
        self._users: TextIO | None = None

    def acquire(self) -> None:
        """Start the server, or join the running one, and count as one of its users.

        Raises:
            StorageError: the home cannot be made.
            DatabaseError: there are no binaries, the home cannot be reached, or the server does
                not start; the message names the path and quotes the server's log.
        """
        make_home(self.home)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.log.parent.mkdir(exist_ok=True)
            with self._gate():
                self._ensure_running()
                self._users = _open_lock(self.directory / "users")
                fcntl.flock(self._users, fcntl.LOCK_SH)
        except PermissionError as error:
            raise DatabaseError(
                f"cannot use {error.filename} as {pwd.getpwuid(os.geteuid()).pw_name}: run as"
                f" the owner of {self.home}, set BABYLON_HOME to a directory of yours,"
                " or set DATABASE_URL"
            ) from error
        except OSError as error:
            raise DatabaseError(
                f"cannot write {error.filename or self.directory} ({error.strerror}): free disk"
                " space, or set BABYLON_HOME to a writable directory"
            ) from error

    def release(self) -> bool:
        """Leave the server; the last user stops it. Return True if this call stopped it."""
        if self._users is None:
            return False
        with self._gate(), self._users as users:
            self._users = None
            fcntl.flock(users, fcntl.LOCK_UN)  # explicitly: a forked child may hold a copy
            if not _try_lock(users):
                return False
            self._stop()
            return True

    def revive(self) -> bool:
        """Restart the server if it died while in use. Return True if it had died.

        Raises:
            DatabaseError: the server does not start.
        """
        with self._gate():
            if not self._is_gone():
                return False
            self._ensure_running()
            return True

    def runs(self) -> bool:
        """Return True if the server runs, with or without users."""
        if not self.data.exists():
            return False
        with self._gate():
            return not self._is_gone()

    def url(self, database: str = "babylon") -> str:
        """Return the URL of a database of the running server, with the password."""
        password = (self.directory / "password").read_text()
        return f"postgresql://{USER}:{password}@127.0.0.1:{self._status()[1]}/{database}"

    @contextmanager
    def _gate(self) -> Iterator[None]:
        with _open_lock(self.directory / "gate") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            yield

    def _ensure_running(self) -> None:
        for _ in range(START_ATTEMPTS):
            with _open_lock(self.directory / "server") as server:
                if _try_lock(server):
                    self._start(server)
            if _wait(lambda: self._accepts() or self._is_gone(), START_S) and self._accepts():
                return
        raise DatabaseError(
            f"the embedded Postgres in {self.data} does not start ({self._last_failure()}): free"
            f" the disk or the port, or set DATABASE_URL; see {self.log}"
        )

    def _start(self, server: TextIO) -> None:
        """Spawn the postmaster in a session of its own, because it may outlive this process."""
        account, folder = server_account(self.home), binaries()
        launch = launcher(account, folder, self.directory)
        if not self.data.exists():
            self._initialise(folder, account, launch)
        _give(self.data, account)
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        settings = {**_SETTINGS, "port": str(self._choose_port())}
        command: Command = [folder / "postgres", "-D", self.data]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                **launch(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(server.fileno(),),
                start_new_session=True,
            )
        _STARTED[self.data] = process.pid
        process.returncode = 0  # so that Popen does not warn about a process that still runs

    def _initialise(self, folder: Path, account: pwd.struct_passwd, launch: Launch) -> None:
        """Make the cluster beside its final place, then rename it, so that it is never partial."""
        password = self.directory / "password"
        password.unlink(missing_ok=True)
        password.touch(mode=0o600)
        password.write_text(secrets.token_hex(16))
        unfinished = self.directory / "data.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(password, account.pw_uid, account.pw_gid)
            os.chown(unfinished, account.pw_uid, account.pw_gid)
        command: Command = [folder / "initdb", "-D", unfinished, "-U", USER]
        command += [f"--pwfile={password}"]
        command += ["--auth=scram-sha-256", "--encoding=UTF8", "--no-instructions"]
        command += ["--locale-provider=builtin", "--locale=C.UTF-8"]
        _make(self.data, launch(command))
        single_user: Command = [folder / "postgres", "--single", "-c", "exit_on_error=on"]
        single_user += ["-D", unfinished, "postgres"]
        _make(self.data, launch(single_user), "CREATE DATABASE babylon")
        unfinished.rename(self.data)

    def _choose_port(self) -> int:
        """Return last time's port if it is free, so that printed addresses stay valid."""
        remembered = self.directory / "port"
        text = remembered.read_text() if remembered.exists() else ""
        last = int(text) if text.isdecimal() else 0  # empty after a full disk
        for port in (last, 0):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                chosen = int(probe.getsockname()[1])
                remembered.write_text(str(chosen))
                return chosen
        raise DatabaseError("no free TCP port on 127.0.0.1: close programs, or set DATABASE_URL")

    def _stop(self) -> None:
        """Send SIGINT: Postgres ends the remaining sessions, writes a checkpoint and exits."""
        pid, _, _ = self._status()
        if pid and _runs_in(pid, self.data):
            os.kill(pid, signal.SIGINT)
        if not _wait(self._is_gone, STOP_S):
            raise DatabaseError(
                f"the embedded Postgres (process {pid}) did not stop within {STOP_S:.0f} s;"
                f" see {self.log}"
            )

    def _is_gone(self) -> bool:
        with _open_lock(self.directory / "server") as server:
            gone = _try_lock(server)
        # A server frees the lock just before it ends. If ours ended and another process has started
        # the present one, ours is a zombie.
        self._reap(0 if gone else os.WNOHANG)
        return gone

    def _reap(self, flags: int) -> None:
        """Take the exit code of the server that this process started, if it ended."""
        if (child := _STARTED.get(self.data)) is None:
            return
        try:
            ended, _ = os.waitpid(child, flags)
        except ChildProcessError:  # this process is a fork of the one that started it
            ended = child
        if ended:
            _STARTED.pop(self.data, None)

    def _accepts(self) -> bool:
        pid, port, ready = self._status()
        # The port of a killed postmaster answers as long as a child that it had just begun.
        if not ready or not _lives(pid):
            return False
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            return False
        return True

    def _status(self) -> tuple[int, int, bool]:
        """Return (process, port, ready) from ``postmaster.pid``; zeros when it is not complete."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return 0, 0, False
        if len(lines) < 8:
            return 0, 0, False
        return int(lines[0]), int(lines[3]), lines[7].strip() == "ready"

    def _last_failure(self) -> str:
        log = self.log.read_text(errors="replace") if self.log.exists() else ""
        lines = log[-_LOG_TAIL:].splitlines() or ["no log"]
        fatal = [number for number, line in enumerate(lines) if _FATAL.match(line)] or [-1]
        reason = [line for line in lines[fatal[-1] :] if _FATAL.match(line) or _DETAIL.match(line)]
        return " ".join(_DETAIL.sub("", _FATAL.sub("", line)) for line in reason or lines[-1:])


def _give(data: Path, account: pwd.struct_passwd) -> None:
    """As root, give a cluster to the account: a copied or moved home may have another owner."""
    if os.geteuid() or data.stat().st_uid == account.pw_uid:
        return
    for directory, _, files in os.walk(data, topdown=False):
        for name in (*files, ""):
            os.chown(os.path.join(directory, name), account.pw_uid, account.pw_gid)


def _open_lock(path: Path) -> TextIO:
    return path.open("a")


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _make(data: Path, arguments: dict[str, Any], text: str = "") -> None:
    done = subprocess.run(**arguments, input=text, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        errors = [line for line in lines if _ERROR.match(line)]
        reason = (errors or lines[-1:] or [f"exit code {done.returncode}"])[0]
        raise DatabaseError(
            f"cannot make the embedded Postgres in {data} ({_ERROR.sub('', reason)}): free the"
            " disk, set BABYLON_HOME to a directory with room, or set DATABASE_URL"
        )


def _lives(pid: int) -> bool:
    try:
        return lives(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def _runs_in(pid: int, data: Path) -> bool:
    """Return True if the process is a postmaster of that directory, not a later owner of its id."""
    try:
        return str(data) in psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return False
