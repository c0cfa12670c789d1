"""A PostgreSQL of another version, for a run of the tests: TEST_POSTGRES=/path/to/its/bin."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from tests.ports import free_port

PASSWORD = "s3cret"


class OtherPostgres:
    """A cluster in ``directory``, made by the programs in ``programs`` and removed at the end.

    ``arguments`` are those of ``postgres``. ``copy_of`` makes a standby of that (stopped) cluster.
    """

    def __init__(
        self,
        programs: Path,
        *arguments: str,
        copy_of: "OtherPostgres | None" = None,
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="babylon-postgres-"))
        self.data = self.directory / "data"
        self.port = free_port()
        self._programs, self._arguments, self._copy_of = programs, arguments, copy_of
        self._account: dict[str, Any] = {"env": {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}}
        if os.geteuid() == 0:  # it refuses to run as root
            nobody = pwd.getpwnam("nobody")
            os.chown(self.directory, nobody.pw_uid, nobody.pw_gid)
            self._account |= {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make the files; remove them at the end."""
        if self._copy_of is None:
            password = self.directory / "password"
            password.write_text(PASSWORD)
            command = ["initdb", "-D", self.data, "-U", "babylon", f"--pwfile={password}"]
            self._run(*command, "--auth=scram-sha-256", "--encoding=UTF8", "--no-locale", "-N")
        else:
            subprocess.run(["cp", "-a", self._copy_of.data, self.data], check=True)
            (self.data / "standby.signal").touch()
        try:
            yield
        finally:
            shutil.rmtree(self.directory)

    @contextmanager
    def running(self) -> Iterator[Self]:
        self._start()
        try:
            yield self
        finally:
            self._server.send_signal(signal.SIGINT)
            self._server.wait()

    def _start(self) -> None:
        options = {"port": self.port, "unix_socket_directories": "", "fsync": "off"}
        if self._copy_of is not None:
            primary = f"host=127.0.0.1 port={self._copy_of.port} user=babylon password={PASSWORD}"
            options["primary_conninfo"] = primary
        settings = [f"{name}={value}" for name, value in options.items()]
        with (self.directory / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [self._programs / "postgres", "-D", self.data]
                + [part for setting in (*settings, *self._arguments) for part in ("-c", setting)],
                stdout=log,
                stderr=log,
                **self._account,
            )
        for _ in range(600):
            pid = self.data / "postmaster.pid"
            if pid.exists() and "ready" in pid.read_text():
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            if self._server.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError((self.directory / "log").read_text())

    def url(self, database: str = "babylon") -> str:
        return f"postgresql://babylon:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def _run(self, program: str, *arguments: object) -> None:
        command = [str(self._programs / program), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, **self._account)
        assert done.returncode == 0, done.stdout + done.stderr
